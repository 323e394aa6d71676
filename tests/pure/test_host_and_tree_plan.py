"""Plans of host and tree against closed forms, and definitions of Le et al. 2018."""

from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise
from math import fsum
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boxes import WithoutUpdate, after, box, chain, exchange_s, link
from findings import numbers
from paceline.core.after_backward import AfterBackward, after_backward
from paceline.core.compare import breakdown_by_device
from paceline.core.cost import ProfiledCost, Roofline, Slowed
from paceline.core.plan import Kind, PriceKey
from paceline.core.simulate import period, simulate
from paceline.core.strategy import Strategy, Window
from paceline.report.plans import of_after_backward
from paceline.strategies import host, tree
from paceline.strategies.host.config import HostReduce
from paceline.strategies.host.plan import plan
from paceline.strategies.tree.config import Tree
from paceline.strategies.tree.plan import children, parent
from paceline.strategies.tree.plan import plan as plan_tree

NBYTES = 4000
GPU_LINKS = [link("gpu0", "h", 1000.0), link("gpu1", "h", 1000.0)]


def test_a_chunk_is_copied_after_its_last_layer_and_the_last_layers_are_single():
    tasks = plan(chain(*[(1, NBYTES)] * 5), box("cpu", "cpu"), HostReduce(chunk=3), Window(1))
    assert after(tasks["s0/d2h[0]@worker0"]) == ("s0/backward[l2]@worker0",)
    sizes = [tasks[f"s0/reduce[{part}]"].cost.nbytes / (3 * NBYTES) for part in range(3)]
    assert sizes == [3, 1, 1]


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_cpus_move_each_byte_through_their_memory_3n_plus_1_times(workers):
    # Each rank reads and writes its gradients; the sum reads those of all ranks and writes one.
    nbytes_per_s, latency_s = 1e6, 0.25
    machine = box(
        *["cpu"] * workers,
        host={"memory_bandwidth_bytes_per_s": nbytes_per_s, "reduce_latency_s": latency_s},
        device={"memory_bandwidth_bytes_per_s": 1.0},  # the rate of layers does not matter
    )
    tasks = plan(chain((0, NBYTES)), machine, HostReduce(workers=workers), Window(1))
    expected = (3 * workers + 1) * NBYTES / nbytes_per_s + latency_s
    assert exchange_s(tasks, machine) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("uses_cores", [False, True])
def test_sums_hide_behind_backward_unless_they_use_the_cores_of_the_ranks(uses_cores):
    # A sum takes 1 s, during 2 s of backward; the last layer's gradients are tiny.
    links = [link("h", "h", 1.0, uses_cores=uses_cores)]
    machine = box("cpu", "cpu", links=links, host={"reduce_latency_s": 1.0})
    window = lambda n: plan(chain((2, 4), (2, 4)), machine, HostReduce(), Window(n))  # noqa: E731
    step_s = period(window, WithoutUpdate(machine), 3)
    assert step_s == pytest.approx(4 + 1 + (1 if uses_cores else 0))


@pytest.mark.parametrize(
    ("share", "num_layers", "expected"),
    [(False, 1, 8), (True, 1, 16), (False, 2, 12)],  # a copy back overlaps the next copy in
)
def test_gpus_share_a_link_that_takes_both_directions_at_once(share, num_layers, expected):
    behind = [link("gpu0", "gpu2", 1e9), link("gpu1", "gpu2", 1e9), link("gpu2", "h", 1000.0)]
    machine = box("gpu", "gpu", "gpu", links=behind if share else GPU_LINKS)
    tasks = plan(chain(*[(0, NBYTES)] * num_layers), machine, HostReduce(), Window(1))
    assert exchange_s(tasks, machine) == pytest.approx(expected)


@pytest.mark.parametrize(("chunk", "num_syncs"), [(1, 6), (2, 4), (5, 2), (6, 6)])
def test_each_chunk_synchronises_a_gpu_once_and_slows_its_backward(chunk, num_syncs):
    machine = box("gpu", "gpu", links=GPU_LINKS, device={"sync_latency_s": 0.125})
    tasks = plan(chain(*[(1, 4)] * 6), machine, HostReduce(chunk=chunk), Window(1))
    spans = simulate(tasks, Roofline.of(machine)).spans
    backward_s = max(s.end_s for s in spans if s.kind is Kind.BACKWARD)
    assert backward_s == pytest.approx(6 + 0.125 * num_syncs)


@pytest.mark.parametrize(
    ("facts", "measured", "expected"),
    [
        ({"sync_latency_s": 0.125}, {PriceKey("gpu0", Kind.BACKWARD, "l0"): 7.0}, 7.125),
        ({"call_latency_s": 0.5}, {}, 1.5),  # the default of sync_latency_s
    ],
)
def test_synchronising_is_paid_on_top_of_backward(facts, measured, expected):
    machine = box("gpu", "gpu", links=GPU_LINKS, device=facts)
    task = plan(chain((1, 4)), machine, HostReduce(), Window(1))["s0/backward[l0]@worker0"]
    assert ProfiledCost(measured, Roofline.of(machine)).seconds(task) == expected


def test_several_hosts_exchange_their_sums_in_a_ring():
    # Three ranks on two hosts. Each host sends 2 (n - 1) / n of the bytes to the other.
    machine = box("cpu", "cpu", "cpu", hosts="aab", links=[link("a", "b", 1000.0, 0.25)])
    tasks = plan(chain((0, NBYTES), (0, NBYTES)), machine, HostReduce(workers=3), Window(1))
    send = tasks["s0/send[1]"]
    assert after(send) == ("s0/reduce[1]",)
    assert Roofline.of(machine).seconds(send) == pytest.approx(4.0 + 2 * 0.25)
    assert set(after(tasks["s0/step@worker2"])) >= {"s0/send[0]", "s0/send[1]"}
    assert exchange_s(tasks, machine) == pytest.approx(2 * 4.5)  # sums overlap messages
    # Waiting for the exchange is communication, not idle time.
    for parts in breakdown_by_device(simulate(tasks, Roofline.of(machine))).values():
        assert (parts.exposed_s, parts.idle_s) == pytest.approx((9.0, 0.0), abs=1e-4)


def between_all(number: int, nbytes_per_s: float) -> list[dict]:
    """Return a separate link between each pair of GPUs."""
    pairs = combinations(range(number), 2)
    return [link(f"gpu{i}", f"gpu{j}", nbytes_per_s) for i, j in pairs]


@given(st.integers(1, 300))
def test_ranks_equal_to_k_modulo_2k_send_to_the_rank_at_distance_k(world_size):
    expected, k = set(), 1
    while k < world_size:
        expected |= {(rank, rank - k) for rank in range(world_size) if rank % (2 * k) == k}
        k *= 2
    assert {(r, parent(r)) for r in range(1, world_size)} == expected
    assert parent(0) is None
    below = {rank: children(rank, world_size) for rank in range(world_size)}
    assert all(own == sorted(own) for own in below.values())
    assert {(child, rank) for rank, own in below.items() for child in own} == expected


@pytest.mark.parametrize(("uses_cores", "workers"), [(False, 4), (True, 4), (True, 5)])
def test_processes_of_one_host_share_its_link(uses_cores, workers):
    links = [link("h", "h", 1000.0, 0.25, uses_cores=uses_cores)]
    machine = box(*["cpu"] * workers, links=links)
    tasks = plan_tree(chain((0, NBYTES)), machine, Tree(workers=workers), Window(1))
    assert exchange_s(tasks, machine) == pytest.approx(2 * (workers - 1) * 4.25)


def test_additions_of_cores_run_at_the_speed_of_the_memory_and_not_of_layers():
    own, layers = ({"memory_bandwidth_bytes_per_s": rate} for rate in (6000.0, 1.0))
    machine = box("cpu", "cpu", links=[link("h", "h", 1e18)], host=own, device=layers)
    tasks = plan_tree(chain((0, NBYTES)), machine, Tree(), Window(1))
    assert exchange_s(tasks, machine) == pytest.approx(2.0)


def test_a_worker_updates_after_it_has_received_and_forwarded_the_means():
    machine = box(*["gpu"] * 4, links=between_all(4, 1000.0))
    tasks = plan_tree(chain((1, NBYTES)), machine, Tree(workers=4), Window(1))
    assert after(tasks["s0/send[down2]"]) == ("s0/reduce[2]@worker0",)
    # A worker first sends to all its children, the nearest last.
    for worker, message in enumerate(("down1", "down1", "down3", "down3")):
        assert after(tasks[f"s0/step@worker{worker}"]) == (f"s0/send[{message}]",)


class LayerPhases(NamedTuple):
    """Seconds of the phases of a layer, by the symbols of Le et al. 2018, section 3.2.

    Layers are in the paper's order: layer 1 is the first layer of the network and the last one of
    backward. All workers are equally fast.
    """

    t_bp: float  # back-propagation (steps B-1 to B-4)
    t_as: float  # synchronising the device with its host (B-4-1)
    t_aa: float  # accumulating its gradients (B-4-2, or T-3 on GPU 0); here also copying to a host
    t_bc: float  # broadcasting the result to all workers (B-4-3, or parameters in T-5)


def backpropagation_s(layers: Sequence[LayerPhases]) -> float:
    """Return T_BP = sum of all t_bp: backward on one worker alone (definition 3.1)."""
    return fsum(layer.t_bp for layer in layers)


def host_s(layers: Sequence[LayerPhases]) -> float:
    """Return T, the maximum of T_BP^i: backward with the host's exchange (definitions 3.2 and 3.3).

    T_BP^i = sum over k = l, ..., i of (t_bp^k + t_as^k) + t_aa^i + t_bc^i, counted from the start
    of backward. Each layer is one chunk, and no layer waits for another one.
    """
    computed = accumulate(layer.t_bp + layer.t_as for layer in reversed(layers))
    return max(
        done + layer.t_aa + layer.t_bc
        for layer, done in zip(reversed(layers), computed, strict=True)
    )


def typical_s(layers: Sequence[LayerPhases]) -> float:
    """Return T' = T_BP + sum of all (t_aa + t_bc), the time of strategy tree (def. 3.4)."""
    return backpropagation_s(layers) + fsum(layer.t_aa + layer.t_bc for layer in layers)


NBYTES_PER_S, ADDS_PER_S, SYNC_S = 1e6, 5e6, 0.01
layers = st.lists(st.tuples(st.floats(1e-3, 1.0), st.integers(1, 10**5)), min_size=1, max_size=8)


def left(strategy: Strategy, workload, machine, workers: int, num_steps: int = 2) -> AfterBackward:
    """Return the times of a strategy's first step after backward."""
    config, cost = strategy.config(workers=workers), Slowed(WithoutUpdate(machine), 1.0)
    plan = strategy.planning.plan(workload, machine, config, Window(num_steps))
    return after_backward(plan, cost, simulate(plan, cost))


def in_turn(sizes):
    """Return the phases of layers whose backward is so long that no copy waits for another."""
    wire_times = [(t_bp, 4 * n / NBYTES_PER_S) for t_bp, n in sizes]
    times = [LayerPhases(t_bp, SYNC_S, 2 * t, t) for t_bp, t in wire_times]
    return [
        before._replace(t_bp=max(before.t_bp, later.t_aa + later.t_bc))
        for before, later in pairwise(times)
    ] + times[-1:]


@given(layers)
def test_host_reproduces_definitions_3_1_to_3_3(sizes):
    links = [link(f"gpu{i}", "h", NBYTES_PER_S) for i in range(2)]
    sums = {"memory_bandwidth_bytes_per_s": 3 * NBYTES_PER_S}  # two are read and one is written
    machine = box("gpu", "gpu", links=links, host=sums, device={"sync_latency_s": SYNC_S})
    times = in_turn(sizes)
    work = chain(*[(one.t_bp, 4 * n) for one, (_, n) in zip(times, sizes, strict=True)])
    found = left(host.STRATEGY, work, machine, workers=2)
    assert found.backward_s == pytest.approx(backpropagation_s(times), rel=1e-9)
    assert found.sync_s == pytest.approx(SYNC_S * len(times), rel=1e-9)
    assert found.total_s == pytest.approx(host_s(times), rel=1e-9)
    overhead_s = host_s(times) - backpropagation_s(times)
    assert found.left_s == pytest.approx(overhead_s - found.sync_s, rel=1e-6)


@given(layers, st.sampled_from([2, 3, 4, 5, 8]))
def test_tree_reproduces_definition_3_4(sizes, workers):
    levels, device = (workers - 1).bit_length(), {"memory_bandwidth_bytes_per_s": ADDS_PER_S}
    machine = box(*["gpu"] * workers, links=between_all(workers, NBYTES_PER_S), device=device)
    work = chain(*[(t_bp, 4 * n) for t_bp, n in sizes])
    wire_s, add_s = levels * 4 / NBYTES_PER_S, levels * 4 * 3 / ADDS_PER_S  # per value
    times = [LayerPhases(t_bp, 0.0, n * (wire_s + add_s), n * wire_s) for t_bp, n in sizes]
    found = left(tree.STRATEGY, work, machine, workers)
    assert (found.backward_s, found.sync_s) == (pytest.approx(backpropagation_s(times)), 0.0)
    assert found.total_s == pytest.approx(typical_s(times), rel=1e-9)
    assert found.left_s == pytest.approx(found.overhead_s, rel=1e-6)
    exchange_s = sum(one.t_aa + one.t_bc for one in times)
    assert (found.exchange_s, found.hidden_s) == (pytest.approx(exchange_s, rel=1e-6), 0.0)

    window = lambda n: plan_tree(work, machine, Tree(workers=workers), Window(n))  # noqa: E731
    cost = WithoutUpdate(machine)
    assert simulate(window(1), cost).makespan_s == pytest.approx(typical_s(times), rel=1e-9)
    if workers & (workers - 1) == 0:
        assert period(window, cost, 2) == pytest.approx(typical_s(times), rel=1e-9)


def of_plan(name, left_s, overhead_s, *, workers=2, codec=None):
    told = None
    if left_s is not None:
        told = AfterBackward(0.1, overhead_s - left_s, left_s, 0.1 + overhead_s)
    return SimpleNamespace(
        strategy=name, workers=workers, placement="as listed", codec=codec, after_backward=told
    )


def test_overheads_are_compared_and_not_the_time_left_after_backward():
    # Many small layers: host has less left after backward, but more synchronisation.
    said = of_after_backward([of_plan("tree", 0.004, 0.004), of_plan("host", 0.001, 0.006)])
    assert said.rindex("4.00 ms (tree)") < said.rindex("6.00 ms (host)")
    # Plans with codecs or other numbers of workers are not compared.
    alone = [of_plan("host", 0.001, 0.002), of_plan("tree", 0.004, 0.004, workers=4)]
    said = of_after_backward([of_plan("host", 0.0, 0.0, codec="half"), *alone])
    assert (numbers(said)[:3], "tree" in said) == ([100, 2, 1], False)
    assert of_after_backward([of_plan("allreduce", None, None)]) is None
