"""The sizes of sub-batches that a search tries, and the one it takes."""

from dataclasses import replace

import pytest

from boxes import box, link
from paceline.core.cost import Roofline
from paceline.core.machine import Machine
from paceline.core.simulate import period
from paceline.core.strategy import Window
from paceline.core.workload import Workload
from paceline.planner import search
from paceline.strategies import STRATEGIES
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.plan import plan, sizes
from subbatches import BATCH, NET

SUBBATCH = STRATEGIES["subbatch"]
WORKERS = 8


def workload(samples: int) -> Workload:
    return replace(NET, batch_size=samples)


def ring(latency_s: float, nbytes_per_s: float = 1e4) -> Machine:
    gpus = [f"gpu{i}" for i in range(WORKERS)]
    pairs = zip(gpus, gpus[1:] + gpus[:1], strict=True)
    links = [link(one, other, nbytes_per_s, latency_s) for one, other in pairs]
    speed = {"encode_values_per_s": 1e4, "decode_values_per_s": 1e4}
    return box(*["gpu"] * WORKERS, links=links, device={"codecs": {"eightbit": speed}})


def step_s(machine: Machine, config: SubBatch) -> float:
    def tasks(num_steps: int):
        return plan(workload(BATCH), machine, config, Window(num_steps))

    return period(tasks, Roofline.of(machine), 2)


def test_the_sizes_are_the_step_its_halves_and_a_kth():
    found = [one.sub_batch for one in sizes(workload(BATCH), SubBatch(WORKERS))]
    assert found == [WORKERS * BATCH, 48, 24, None]
    assert [one.sub_batch for one in sizes(NET, SubBatch(3, sub_batch=10))] == [10]
    assert [one.sub_batch for one in sizes(workload(1), SubBatch(WORKERS))] == [None]


@pytest.mark.parametrize("latency_s", [1e-6, 1e-3, 0.02, 0.1, 1.0])
def test_the_shortest_step_is_found_for_each_codec(latency_s: float):
    machine = ring(latency_s)
    found = search(workload, machine, [SUBBATCH], WORKERS * BATCH, WORKERS)
    assert {one.codec for one in found} == {None, "dynamic8"}
    for one in found:
        named = one.config.activations, one.config.activation_gradients, one.config.gradients
        asked = SubBatch(WORKERS, None, *named)
        shortest = min(step_s(machine, other) for other in sizes(workload(BATCH), asked))
        assert step_s(machine, one.config) == pytest.approx(shortest, rel=1e-3)
        assert any("--set sub_batch=" in note for note in one.notes) == bool(one.config.sub_batch)


def test_messages_that_cost_much_make_sub_batches_larger():
    chosen = []
    for latency_s in (1e-6, 1.0):
        found = search(workload, ring(latency_s), [SUBBATCH], WORKERS * BATCH, WORKERS)
        chosen.append(found[0].config.sub_batch or BATCH)
    assert chosen[0] < chosen[1] == WORKERS * BATCH


def test_a_size_that_is_asked_for_is_the_only_one():
    options = {"sub_batch": 20}
    found = search(workload, ring(1.0), [SUBBATCH], WORKERS * BATCH, WORKERS, options)
    assert {one.config.sub_batch for one in found} == {20}
