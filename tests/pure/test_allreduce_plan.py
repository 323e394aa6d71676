import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.core.cost import Roofline
from paceline.core.errors import InvalidInput
from paceline.core.machine import CodecSpeed, DeviceKind, Machine
from paceline.core.plan import Cost, Kind
from paceline.core.simulate import period, simulate
from paceline.core.strategy import Window
from paceline.core.workload import Layer, Parameter, Workload
from paceline.strategies.allreduce.config import AllReduce
from paceline.strategies.allreduce.plan import buckets, plan

MIB = 2**20


def layer(name: str, *mib: float, flops: float = 0.0) -> Layer:
    parameters = tuple(
        Parameter(f"{name}.{i}", (int(size * MIB) // 4,)) for i, size in enumerate(mib)
    )
    return Layer(name, parameters, 0, Cost(flops), Cost(2 * flops))


def chain(*layers: Layer) -> Workload:
    order = tuple(reversed(range(len(layers))))
    return Workload("chain", 8, layers, order, 0)


def cluster(num_hosts: int, *, gbit_per_s: float = 8.0, uses_cores: bool = False) -> Machine:
    """One device a host, all hosts in a ring; 1 Tflop/s, and 1 GB/s for 8 Gbit/s."""
    facts = {"memory_bytes": 1e9, "memory_bandwidth_bytes_per_s": 1e15, "source": "made up"}
    hosts = [facts | {"name": f"h{i}", "cores": 1} for i in range(num_hosts)]
    devices = [
        facts | {"name": f"cpu{i}", "host": f"h{i}", "kind": "cpu", "flops_per_s": 1e12}
        for i in range(num_hosts)
    ]
    links = [
        {
            "between": [f"h{i}", f"h{(i + 1) % num_hosts}"],
            "bandwidth_bytes_per_s": f"{gbit_per_s} Gbit/s",
            "latency_s": 1e-5,
            "uses_cores": uses_cores,
            "source": "made up",
        }
        for i in range(num_hosts if num_hosts > 2 else num_hosts - 1)
    ]
    return Machine.model_validate(
        {"name": "cluster", "hosts": hosts, "devices": devices, "links": links}
    )


def test_buckets_follow_gradients_and_the_first_is_small():
    ready = [layer("fc", 0.5, 4), layer("conv2", 20), layer("conv1", 6, 1)]
    parts = buckets(ready, None)
    assert [(part.nbytes / MIB, part.last_layer) for part in parts] == [
        (4.5, "fc"),
        (26, "conv1"),
        (1, "conv1"),
    ]


def test_a_given_bucket_size_is_that_of_every_bucket():
    ready = [layer("c", 6, 6), layer("b", 6, 6), layer("a", 6)]
    assert [part.nbytes / MIB for part in buckets(ready, 10)] == [12, 12, 6]
    assert [part.nbytes / MIB for part in buckets(ready, 1000)] == [30]


@given(
    st.lists(st.lists(st.floats(0.01, 40), min_size=1, max_size=3), min_size=1, max_size=12),
    st.none() | st.integers(1, 50),
)
def test_buckets_hold_every_gradient_once(sizes, bucket_mb):
    ready = [layer(f"l{i}", *mib) for i, mib in enumerate(sizes)]
    parts = buckets(ready, bucket_mb)
    assert sum(part.nbytes for part in parts) == sum(one.gradient_nbytes for one in ready)
    assert sum(part.num_parameters for part in parts) == sum(map(len, sizes))
    assert parts[-1].last_layer == ready[-1].name


@pytest.mark.parametrize("num_workers", [2, 3, 8])
def test_an_exchange_that_nothing_hides_takes_the_time_of_a_ring(num_workers):
    # One layer: its gradient is ready only when backward is over.
    work = chain(layer("fc", 100, flops=1e12))
    nbytes = work.gradient_nbytes
    machine = cluster(num_workers)
    ring = 2 * (num_workers - 1) / num_workers * nbytes / 1e9 + 2 * (num_workers - 1) * 1e-5

    def window(steps):
        return plan(work, machine, AllReduce(workers=num_workers), Window(steps))

    step = period(window, Roofline.of(machine), 3)
    update = 4 * work.num_parameters / 1e12
    assert step == pytest.approx(1 + 2 + ring + update, rel=1e-9)


def test_buckets_overlap_the_backward_pass_of_earlier_layers():
    # Backward of fc takes 2 s, of conv 20 s; fc's exchange of 1 s hides behind the latter.
    work = chain(layer("conv", 0.1, flops=10e12), layer("fc", 1000, flops=1e12))
    machine = cluster(2)
    timeline = simulate(plan(work, machine, AllReduce(), Window(1)), Roofline.of(machine))
    compute = 3 * 11 + 4 * work.num_parameters / 1e12
    last = 0.1 * MIB / 1e9 + 2e-5
    assert timeline.makespan_s == pytest.approx(compute + last, rel=1e-6)


def test_an_exchange_that_the_cores_carry_hides_behind_nothing():
    work = chain(layer("conv", 0.1, flops=10e12), layer("fc", 1000, flops=1e12))
    machine = cluster(2, uses_cores=True)
    timeline = simulate(plan(work, machine, AllReduce(), Window(1)), Roofline.of(machine))
    compute = 3 * 11 + 4 * work.num_parameters / 1e12
    exchange = 1000.1 * MIB / 1e9 + 4e-5
    assert timeline.makespan_s == pytest.approx(compute + exchange, rel=1e-6)


def test_ranks_on_one_host_share_its_link():
    machine = cluster(2).model_dump()
    machine["devices"] = [d | {"host": "h0"} for d in machine["devices"]]
    machine["links"] = [machine["links"][0] | {"between": ("h0", "h0")}]
    work = chain(layer("fc", 100))
    tasks = plan(work, Machine.model_validate(machine), AllReduce(), Window(1))
    # Each of the two sends all its bytes (2 (n - 1) / n of them), and both through one link.
    assert tasks["s0/reduce[0]"].cost.nbytes == 2 * work.gradient_nbytes


def test_one_worker_exchanges_nothing():
    tasks = plan(chain(layer("fc", 100)), cluster(2), AllReduce(workers=1), Window(2)).tasks
    assert Kind.REDUCE not in {task.kind for task in tasks}


def test_more_workers_than_devices_are_refused():
    with pytest.raises(InvalidInput, match="workers: 3 do not fit on machine 'cluster', which has"):
        plan(chain(layer("fc", 1)), cluster(2), AllReduce(workers=3), Window(1))


def test_devices_that_no_link_joins_are_refused():
    apart = cluster(2).model_copy(update={"links": ()})
    with pytest.raises(InvalidInput, match="no link leads from"):
        plan(chain(layer("fc", 1)), apart, AllReduce(), Window(1))


@pytest.mark.parametrize("fields", [{"workers": 0}, {"bucket_mb": 0}, {"buckets": 3}])
def test_a_configuration_that_makes_no_sense_is_refused(fields):
    with pytest.raises((ValidationError, TypeError)):
        AllReduce(**fields)


@pytest.mark.parametrize(
    ("pcie_gbyte_per_s", "network_gbit_per_s"), [(1, 1000), (100, 1)], ids=["pcie", "network"]
)
def test_each_message_pays_the_latencies_of_all_links_on_its_way(
    pcie_gbyte_per_s, network_gbit_per_s
):
    # A GPU in each of two hosts: PCIe with 10 us, a network with 5 ms, PCIe again. Two messages.
    facts = {"memory_bytes": 1e9, "memory_bandwidth_bytes_per_s": 1e15, "source": "made up"}
    gpus = [
        facts | {"name": f"gpu{i}", "host": f"h{i}", "kind": "gpu", "flops_per_s": 1e12}
        for i in range(2)
    ]
    slot = {"bandwidth_bytes_per_s": f"{pcie_gbyte_per_s} GB/s", "latency_s": "10 us"}
    network = {"bandwidth_bytes_per_s": f"{network_gbit_per_s} Gbit/s", "latency_s": "5 ms"}
    links = [slot | {"between": [f"gpu{i}", f"h{i}"], "source": "-"} for i in range(2)]
    links.append(network | {"between": ["h0", "h1"], "source": "-"})
    machine = Machine.model_validate(
        {
            "name": "two-boxes",
            "hosts": [facts | {"name": f"h{i}", "cores": 1} for i in range(2)],
            "devices": gpus,
            "links": links,
        }
    )
    work = chain(layer("fc", 1))
    task = plan(work, machine, AllReduce(), Window(1))["s0/reduce[0]"]
    slowest = min(pcie_gbyte_per_s * 1e9, network_gbit_per_s * 1e9 / 8)
    expected = work.gradient_nbytes / slowest + 2 * 5.02e-3
    assert Roofline.of(machine).seconds(task) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("codec", "times"), [(None, 2), ("dynamic8", 4)])
def test_cores_copy_gradients_into_buckets_and_back(codec, times):
    work = chain(layer("a", 1), layer("b", 2))
    speed = {"eightbit": CodecSpeed(encode_values_per_s=1e9, decode_values_per_s=1e9)}
    machine = cluster(2).with_each("devices", codecs=speed)
    for workers, copied in ((2, times), (1, 0)):
        made = plan(work, machine, AllReduce(workers=workers, codec=codec), Window(1))
        traffic = {task.part: task.cost.nbytes for task in made.tasks if task.kind is Kind.BACKWARD}
        assert traffic == {one.name: copied * one.gradient_nbytes for one in work.layers}


def test_gpus_copy_beside_what_limits_them():
    ends = ("cpu0", "cpu1")
    gpus = cluster(2).with_each("devices", kind=DeviceKind.GPU).with_each("links", between=ends)
    made = plan(chain(layer("a", 1)), gpus, AllReduce(workers=2), Window(1))
    assert all(not task.cost.nbytes for task in made.tasks if task.kind is Kind.BACKWARD)
