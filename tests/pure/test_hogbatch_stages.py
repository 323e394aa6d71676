"""What batches cost, what training holds, and what a plan refuses."""

from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from boxes import box, link
from hogbatches import at_speeds, per_sample, roof
from paceline.core.errors import InvalidInput
from paceline.core.plan import COMPUTE, Cost
from paceline.core.simulate import simulate
from paceline.core.strategy import Window
from paceline.core.workload import Layer, Parameter, Workload
from paceline.strategies.hogbatch.config import Hogbatch
from paceline.strategies.hogbatch.plan import memory, plan, plan_until, updates_per_batch


def test_the_workloads_own_batch_costs_what_it_says():
    layer = Layer("a", (Parameter("w", (10,)),), 8, Cost(7, 300, 3), Cost(9, 500, 4, 1))
    work = Workload("one", 12, (layer,), (0,), 0)
    tasks = plan(work, box("cpu"), Hogbatch(workers=1, policy="hogbatch", threads=1), Window(1))
    assert tasks["s0/forward[a]@worker0"].cost == layer.forward
    assert tasks["s0/backward[a]@worker0"].cost == layer.backward


@pytest.mark.parametrize(
    ("threads", "nbytes"), [(1, (40 + 65, 80 + 105)), (3, (120 + 65, 240 + 105))]
)
def test_parameters_and_calls_are_paid_for_in_small_batches_too(threads, nbytes):
    # A quarter of the batch: a quarter of the flops and of the 260 and 420 bytes of activations,
    # but all 40 bytes of parameters once or twice, for every thread, and all calls. The layer with
    # which backward ends writes its gradients, and reads nothing for one of the samples.
    layer = Layer("a", (Parameter("w", (10,)),), 8, Cost(8, 300, 3), Cost(16, 500, 4))
    first = Layer("z", (Parameter("w", (10,)),), 8, Cost(), Cost(16, 460, 4))
    work = Workload("one", 12, (first, layer), (1, 0), 0)
    config = Hogbatch(workers=1, policy="cpu_gpu", cpu_batch=(3 // threads, 64), threads=threads)
    tasks = plan(work, box("cpu"), config, Window(1))
    assert tasks["s0/forward[a]@worker0"].cost == Cost(2, nbytes[0], 3)
    assert tasks["s0/backward[a]@worker0"].cost == Cost(4, nbytes[1], 4)
    assert tasks["s0/backward[z]@worker0"].cost == Cost(4, threads * 40 + 105, 4)
    assert tasks["s0/step@worker0"].cost == Cost(40 * threads, 3 * 80 * threads, 2)


def test_threads_are_the_hosts_unless_told():
    machine = box("cpu", "cpu")  # 8 cores
    assert updates_per_batch(machine, Hogbatch()) == {"cpu0": 4, "cpu1": 4}
    assert updates_per_batch(machine, Hogbatch(threads=3, beta=0.5)) == {"cpu0": 1.5, "cpu1": 1.5}


def test_memory_holds_the_largest_batch_and_one_shared_model():
    machine = box("cpu", "gpu", links=[link("gpu1", "h", 1000.0)])
    work = per_sample(10, numel=100)  # 800 bytes of parameters, 80 of features a layer, 400 in
    config = Hogbatch(threads=2, cpu_batch=(1, 15), gpu_batch=(1, 5))
    # Features: both layers', and the gradients of the second's input and output: 320 bytes for 10.
    assert memory(work, machine, config) == {
        "h": 800,
        "cpu0": 2 * 800 + 3 * 320,
        # Replica, gradient, the copy of the model, two changes; samples of three batches.
        "gpu1": 5 * 800 + 160 + 3 * 200,
    }
    in_turn = replace(config, gpu_depth=1)
    assert memory(work, machine, in_turn)["gpu1"] == 4 * 800 + 160 + 200


def test_a_horizon_is_reached_by_all_workers():
    machine = at_speeds(1.0, 30.5)
    tasks = plan_until(per_sample(10), machine, Hogbatch(policy="hogbatch"), 55.0)
    ends = Counter(span.on[0].owner for span in simulate(tasks, roof(machine)).spans)
    assert set(ends) == {"cpu0", "cpu1"}
    last = defaultdict(float)
    for span in simulate(tasks, roof(machine)).spans:
        last[span.on[0].owner] = max(last[span.on[0].owner], span.end_s)
    assert min(last.values()) >= 55.0
    assert all(task.kind in COMPUTE for task in tasks.tasks)


@pytest.mark.parametrize("horizon_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_horizon_that_never_comes_is_refused(horizon_s):
    with pytest.raises(ValueError, match="a horizon is a positive number of seconds"):
        plan_until(per_sample(1), box("cpu"), Hogbatch(workers=1), horizon_s)


@pytest.mark.parametrize(
    ("machine", "says"),
    [
        (box("cpu"), "workers: 2 do not fit on machine 'box', which has 1 devices"),
        (box("cpu", "gpu"), "no link leads from 'h' to 'gpu1'"),
        (box("cpu", "cpu", hosts="ab"), "'cpu0' is on 'a' and others are on 'b'; take the devices"),
    ],
)
def test_machines_that_cannot_share_a_model_are_refused(machine, says):
    with pytest.raises(InvalidInput, match=says):
        plan(per_sample(4), machine, Hogbatch(), Window(1))
