"""Trees of hubs and bottleneck hubs (section 3.4.1), servers in main memory (3.4.2)."""

from functools import partial

import pytest

from boxes import after, box, link
from findings import numbers
from paceline.core.cost import Roofline, compute_lane, link_lane
from paceline.core.machine import Machine
from paceline.core.plan import Kind, Plan
from paceline.core.strategy import Window
from paceline.core.wire_format import Purpose
from paceline.core.workload import Cost, Layer, Parameter, Workload
from paceline.planner import Forecast, forecast, forecast_one, search
from paceline.records.built_in import recorded
from paceline.records.machine_file import find_machine
from paceline.strategies import find_strategy
from paceline.strategies.wheel import STRATEGY
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.plan import memory, place, plan
from paceline.strategies.wheel.split import FROM_HUB, TO_HUB, messages, split
from refusals import refused
from wheels import BODY, CROSSING, HEAD, SAMPLES, UPDATE_S, model, period_of

WHOLE = BODY + HEAD
HEAD_FEATURES = 16000 + 400 + 16400
FAST, INNER, MEMORY, BUS = 1e15, 20 * CROSSING, 10 * WHOLE, 1e6  # bytes per second


def rooms(num_rooms: int, num_bodies: int, between: float = FAST, inner: float = INNER) -> Machine:
    """Return a tree of hosts: a root, and `num_rooms` child hubs with bodies each."""
    hosts, links = ["root"], []
    for room in range(num_rooms):
        bodies = [f"body{room}{i}" for i in range(num_bodies)]
        links += [link("root", f"hub{room}", between)]
        links += [link(f"hub{room}", body, inner) for body in bodies]
        hosts += [f"hub{room}", *bodies]
    memory = {"memory_bandwidth_bytes_per_s": MEMORY}
    return box(*["cpu"] * len(hosts), links=links, hosts=hosts, host=memory)


@pytest.mark.parametrize(
    ("workers", "lanes", "gather", "num_exchanges"),
    [(2, 1, None, 12), (4, 2, None, 12), (8, 2, 8, 6), (4, 1, 3, 8), (6, 2, 1, 36), (4, 2, 20, 1)],
)
@pytest.mark.parametrize("staleness", [0, 16])
def test_links_carry_the_bytes_of_the_formulas(workers, lanes, gather, num_exchanges, staleness):
    lanes = lanes if staleness else 1
    config = Wheel(workers, lanes, child_hubs=2, gather=gather, staleness=staleness)
    work, of_hub = model(), workers // 2
    tasks = plan(work, rooms(2, -(-of_hub // lanes)), config, Window(12)).tasks
    sent = messages(split(work, config), config)

    def carried(one: str, other: str) -> int:
        return sum(task.cost.nbytes for task in tasks if link_lane(one, other) in task.on)

    for room in range(2):
        hub, bodies = f"hub{room}", [f"body{room}{i}" for i in range(-(-of_hub // lanes))]
        # A child hub sends means of `gather` steps, for both halves of the model.
        assert carried(hub, "root") == carried("root", hub) == num_exchanges * WHOLE
        up, down = (
            12 * of_hub * sum(sent[purpose].nbytes for purpose in way) for way in (TO_HUB, FROM_HUB)
        )
        assert sum(carried(body, hub) for body in bodies) == up
        assert sum(carried(hub, body) for body in bodies) == down
    updates = [task for task in tasks if task.kind is Kind.STEP]
    assert {task.on for task in updates} == {(compute_lane("cpu0"),)}
    assert len(updates) == 2 * num_exchanges


@pytest.mark.parametrize("num_rooms", [1, 2, 3])
def test_a_synchronous_step_takes_a_worker_step_sums_exchange_and_all_updates(num_rooms):
    machine = rooms(num_rooms, 1, WHOLE / 2.0)  # an exchange takes two seconds per direction
    config = Wheel(num_rooms, lanes=1, child_hubs=num_rooms, staleness=0)
    fetched_s = 2 * (BODY + CROSSING) / INNER  # labels are sent during forward
    copies_s = (3 + 2) * WHOLE / MEMORY  # a sum, and the returned parameters
    step_s = 3.0 + 0.3 + fetched_s + copies_s + 4.0 + num_rooms * UPDATE_S
    assert period_of(model(), machine, config, 24) == pytest.approx(step_s, rel=1e-6)


@pytest.mark.parametrize("gather", [2, 20])
def test_a_slow_link_to_the_root_limits_exchanges_and_not_single_steps(gather):
    # A child hub has one exchange at a time, 40 s per direction, for one or ten steps per worker.
    exchange_s = 80 + UPDATE_S + 2 * WHOLE / MEMORY
    config, machine = Wheel(4, lanes=2, child_hubs=2, gather=gather), rooms(2, 1, WHOLE / 40.0)
    found = period_of(model(), machine, config, 60)
    assert found == pytest.approx(max(6.0, exchange_s * 2 / gather), rel=0.02)
    # A forecast covers whole means; per step, a child hub has two steps of workers.
    told = forecast(model(), machine, STRATEGY, config, 4 * SAMPLES)
    assert told.link_nbytes["hub0->root"] == pytest.approx(WHOLE * 2 / gather, rel=1e-9)


def test_the_memory_of_root_and_children():
    found = memory(model(), rooms(2, 1), Wheel(4, lanes=2, child_hubs=2))
    assert found["cpu0"] == (2 + 2) * WHOLE
    assert found["cpu1"] == found["cpu3"] == 3 * WHOLE + 2 * (WHOLE + CROSSING) + HEAD_FEATURES
    assert found["cpu2"] == memory(model(), rooms(1, 1), Wheel(2, child_hubs=1))["cpu2"]


@pytest.mark.parametrize(
    ("staleness", "waits"),
    [
        # Step 2 needs the full sum of step 1, and the result of step 0's exchange.
        (16, {"s1/reduce[sum]@worker0", "s0/reduce[copy]@worker0"}),
        (0, {"s1/reduce[copy]@worker0"}),
    ],
)
def test_a_fetch_waits_for_the_exchange_before_the_last_full_sum(staleness, waits):
    config = Wheel(1, lanes=1, child_hubs=1, staleness=staleness)
    fetch = plan(model(), rooms(1, 1), config, Window(4))[f"s2/send[{Purpose.PARAMETERS}]@worker0"]
    assert waits <= set(after(fetch))
    if staleness:
        assert waits == set(after(fetch))


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"workers": 3, "child_hubs": 2}, "child_hubs"),  # unequal numbers of workers
        ({"workers": 8, "child_hubs": 4}, "workers"),
        ({"gather": 3}, "gather"),  # requires child_hubs
        ({"workers": 2, "child_hubs": 2, "staleness": 0}, "staleness"),  # lanes prefetch parameters
    ],
)
def test_an_invalid_tree_is_refused(config, field):
    with refused(field):
        plan(model(), rooms(2, 2), Wheel(**config), Window(1))


LENT, KEPT = Wheel(workers=2, server_memory="host"), Wheel(workers=2)


def two_gpus(**facts) -> Machine:
    """Return a GPU on each of two hosts, with a fast link between the hosts."""
    links = [link("a", "b", 1e12), *(link(f"gpu{i}", host, BUS) for i, host in enumerate("ab"))]
    return box("gpu", "gpu", links=links, hosts="ab", **facts)


def planned(config: Wheel, machine: Machine | None = None, steps: int = 2) -> Plan:
    return plan(model(), machine or two_gpus(), config, Window(steps))


def test_each_answer_copies_the_heads_parameters_to_the_gpu_and_its_gradients_back():
    tasks = planned(LENT)
    there, back = tasks["s1/h2d[head_parameters]@worker0"], tasks["s1/d2h[head_gradients]@worker0"]
    assert there.cost.nbytes == back.cost.nbytes == HEAD
    # Copies follow the arrival of the body's outputs, and precede the reply.
    assert set(after(there)) == {"s1/h2d[labels]@worker0", "s1/h2d[activations]@worker0"}
    assert after(tasks["s1/forward[f0]@worker0"]) == (there.name,)
    assert after(tasks["s1/d2h[activation_gradients]@worker0"]) == (back.name,)
    # The hub's thread waits for both copies, so it computes nothing during them.
    assert all("gpu0/compute" in map(str, one.on) for one in (there, back))
    # Parameters and gradients of the body cross the GPU's bus only if the GPU is the server.
    for config, crossings in ((KEPT, {"d2h[parameters]", "h2d[gradients]"}), (LENT, set())):
        on_bus = [t for t in planned(config).tasks if "gpu0" in {on.owner for on in t.on}]
        copied = {f"{t.kind}[{t.part}]" for t in on_bus if t.kind in (Kind.D2H, Kind.H2D)}
        assert {one for one in copied if one.endswith(("[parameters]", "[gradients]"))} == crossings
    # Updates run at the rate of the host's memory.
    update = tasks["s0/step@worker0"]
    assert [str(on) for on in update.on] == ["gpu0/compute", "a/reduce"]
    slow = two_gpus(host={"memory_bandwidth_bytes_per_s": 1e3})
    assert Roofline.of(slow).seconds(update) == pytest.approx(5 * WHOLE / 1e3)


def test_the_device_needs_memory_for_one_head_and_the_host_for_the_rest():
    found, kept = (memory(model(), two_gpus(), config) for config in (LENT, KEPT))
    assert found["gpu0"] == 2 * HEAD + 2 * CROSSING + HEAD_FEATURES
    assert found["a"] == 2 * WHOLE + 2 * WHOLE
    assert kept["gpu0"] + 2 * HEAD == found["gpu0"] + found["a"]
    assert "a" not in kept
    assert kept["gpu1"] == found["gpu1"]
    # CPU workers use main memory with either option.
    cpus = box("cpu", "cpu", links=[link("a", "b", 1e12)], hosts="ab")
    assert planned(LENT, cpus).tasks == planned(KEPT, cpus).tasks
    assert memory(model(), cpus, LENT) == memory(model(), cpus, KEPT)


def test_a_cpu_body_on_the_servers_host_exchanges_in_memory():
    send = planned(LENT, box("gpu", "cpu", links=[link("gpu0", "h", BUS)]))[
        "s0/send[gradients]@worker0"
    ]
    assert [str(on) for on in send.on] == ["h/reduce", "cpu1/upload"]
    assert send.cost.nbytes == 2 * BODY


def test_child_hubs_sum_in_their_hosts_memory():
    links = [link("a", "b", 1e12), *(link(f"gpu{i}", h, BUS) for i, h in enumerate("aabbb"))]
    machine = box(*["gpu"] * 5, links=links, hosts="aabbb")
    config = Wheel(workers=2, lanes=1, child_hubs=2, server_memory="host")
    tasks = planned(config, machine)
    added = tasks["s0/reduce[sum]@worker0"]
    assert [str(on) for on in added.on] == ["gpu1/compute", "a/reduce"]
    names = {task.name for task in tasks.tasks}
    assert "s0/d2h[hubs_gradients]@worker1" not in names
    assert "s0/send[hubs_gradients]@worker1" in names
    needed = memory(model(), machine, config)
    assert (needed["a"], needed["b"]) == ((3 + 1 + 2 + 2) * WHOLE, (3 + 1) * WHOLE)


def test_the_planner_moves_the_server_to_main_memory_if_the_device_is_too_small():
    least = max(memory(model(), two_gpus(), LENT)[name] for name in ("gpu0", "gpu1"))
    assert least < memory(model(), two_gpus(), KEPT)["gpu0"]
    found = []
    for facts in ({}, {"memory_bytes": least}, {"memory_bytes": 1000}):
        ranking = search(lambda _: model(), two_gpus(device=facts), [STRATEGY], 2 * SAMPLES, 2)
        found.append([one for one in ranking if one.codec is None])
    (usual,), (small,), none = found
    assert (usual.config.server_memory, small.config.server_memory) == ("device", "host")
    assert any("server_memory=host" in note for note in small.notes)
    assert not none


def test_a_plan_can_have_more_workers_than_devices() -> None:
    allreduce = find_strategy("allreduce")
    ranking = search(alexnet, MACHINE, [STRATEGY, allreduce], 6 * 256, workers=6)
    (found,) = [one for one in ranking if one.codec is None]
    assert (found.strategy, found.workers) == ("wheel", 6)
    assert {(one.strategy, one.workers) for one in ranking.refused} == {("allreduce", 6)}
    # The rate of devices alone counts four devices, not six workers.
    own = forecast_one(alexnet, MACHINE, allreduce, allreduce.config(workers=1), 256)
    assert found.alone_samples_per_s / 4 == pytest.approx(own.samples_per_s, rel=1e-6)


MACHINE = find_machine("k40-gigabit")  # four devices: a hub and three for bodies


def of_two_layers(head_share: float, sample_nbytes: int) -> Forecast:
    """Forecast a body that takes a second, and a head that takes `head_share` seconds."""
    nbytes = sample_nbytes * 16

    def layer(name: str, shape: tuple[int, ...], seconds: float) -> Layer:
        flops = seconds / 3 * 1.31e12  # a K40 reaches 1.31 Tflop/s
        return Layer(name, (Parameter("weight", shape),), nbytes, Cost(flops), Cost(2 * flops))

    layers = layer("body", (4, 4, 3, 3), 1.0), layer("head", (16, 16), head_share)
    work, config = Workload("two", 16, layers, (1, 0), 64 * 16), Wheel(workers=6, head="head")
    return forecast_one(lambda _: work, MACHINE, STRATEGY, config, 6 * 16)


def limits(found: Forecast) -> list[float]:
    """Return the figures of the note about a bottleneck hub, if there is one."""
    *notes, _ = found.notes  # the last note is about the changed training
    return numbers(notes[0])[-2:] if notes else []


@pytest.mark.parametrize(
    ("head_s", "sample_nbytes", "ratio_and_needed", "least_s", "most_s"),
    [
        # Six answers in sequence make a step.
        (0.9, 64, [2.7, 3], 5.3, 5.5),
        (1.0, 64, [3.0, 4], 5.9, 6.1),
        (1.1, 64, [3.3, 4], 6.5, 6.7),
        (0.2, 64, [], 1.8, 2.2),  # the hub keeps up with two workers on each device
        # The hub waits for the network: a message of 16 samples takes 7 s.
        (1.5, 50 * 2**20, [], 2 * 6 * 1.5, 1e6),
    ],
)
def test_a_plan_reports_how_many_head_devices_keep_up_if_one_does_not(
    head_s, sample_nbytes, ratio_and_needed, least_s, most_s
):
    """For k = 3, t = 1 s and one device with heads, p k / t is 3 p.

    At 3, calls of 5 us decide. An answer has one call that waits for the GPU, and its update has
    four (two for each of two tensors). A body's step has two calls that wait, and one that loads.
    So p k / t is 3 (1 s + 25 us) / (1 s + 15 us), and three devices are too few.
    """
    found = of_two_layers(head_s, sample_nbytes)
    assert limits(found) == pytest.approx(ratio_and_needed, abs=0.005)
    assert least_s < found.step_s < most_s


alexnet = partial(recorded, "alexnet")


def test_the_head_devices_that_keep_up_are_counted_per_hub() -> None:
    """Each child hub has p = 2.4 s, k = 2 and t = 3 s: 1.6, so it needs two devices."""
    machine = box(*["cpu"] * 7, links=[link("h", "h", 1e15)])
    config = Wheel(workers=8, child_hubs=2)
    found = forecast_one(lambda _: model(head_s=0.8), machine, STRATEGY, config, 8 * SAMPLES)
    assert limits(found) == [1.6, 4]


@pytest.mark.parametrize(
    ("mean_s", "child_hubs", "heads", "bodies", "step_s"),
    [
        # Heads on a hub take 4.8 s for two workers, whose device takes 6 s. Only means cross.
        (1.0, 2, "aabb", "aabb", 6.0),
        # An exchange of means takes 80 s; all heads on one device take only 9.6 s.
        (40.0, 0, "aaaa", "aaaa", 4 * 2.4),
    ],
)
def test_both_hosts_have_heads_if_the_link_is_fast_enough_for_means(
    mean_s: float, child_hubs: int, heads: str, bodies: str, step_s: float
) -> None:
    """Hosts of three and two devices; a mean takes `mean_s` on the link between them."""
    ways = [link("a", "a", 1e15), link("b", "b", 1e15), link("a", "b", WHOLE / mean_s)]
    machine = box(*["cpu"] * 5, hosts="aaabb", links=ways)
    ranking = search(lambda _: model(head_s=0.8), machine, [STRATEGY], 4 * SAMPLES, workers=4)
    best = next(one for one in ranking if (one.codec, one.placement) == (None, "as listed"))
    placed = place(best.machine, best.config)
    assert best.config.child_hubs == child_hubs
    assert [one.host for one in placed.bodies] == [*bodies]
    assert {one.host for one in placed.heads} == set(heads)
    assert best.step_s == pytest.approx(step_s, rel=0.05)
    assert any("child_hubs=2" in note for note in best.notes) == bool(child_hubs)
    if child_hubs:
        assert best.link_nbytes["a->b"] == best.link_nbytes["b->a"] == pytest.approx(WHOLE)
