"""Plans of hogbatch against closed forms: updates, policies, stages, costs, memory."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boxes import at_speeds, box, link
from hogbatches import POLICIES, SHARED, WAYS, num_samples, per_sample, run
from paceline.core.cost import Roofline
from paceline.core.plan import COMPUTE, Cost, Kind
from paceline.core.simulate import period, simulate
from paceline.core.strategy import Window
from paceline.core.workload import Layer, Parameter, Workload
from paceline.strategies.hogbatch.config import Hogbatch, WorkerSpec
from paceline.strategies.hogbatch.plan import PricedWorkers, memory, plan
from paceline.strategies.hogbatch.policy import policy_of
from paceline.strategies.hogbatch.statistics import staleness
from papers.hogbatch import plan_until, updates
from refusals import refused

EQUAL = Hogbatch(policy="hogbatch", threads=1)


def test_staleness_is_the_ratio_of_speeds():
    missed = staleness(updates(run(per_sample(10), at_speeds(1.0, 4.25), EQUAL, 1e3)))
    assert (set(missed["cpu0"]), set(missed["cpu1"])) == ({4, 5}, {0, 1})
    mean = sum(number * count for number, count in missed["cpu0"].items()) / missed["cpu0"].total()
    assert mean == pytest.approx(4.25, rel=0.02)


@given(
    speeds=st.tuples(*[st.floats(0.7, 12)] * 3),
    policy=st.sampled_from([one for one in POLICIES if one != "proportional"]),
    links=st.sampled_from([WAYS, SHARED]),
    numel=st.integers(1, 2000),
    gpu_depth=st.integers(1, 3),
)
def test_the_simulator_reproduces_the_coordinators_decisions(
    speeds, policy, links, numel, gpu_depth
):
    # The oracle knows only simulated times: it calls the policy again, with the updates that are
    # complete in the timeline at the time of each request.
    machine = at_speeds(*speeds, kinds=["cpu", "gpu", "gpu"], links=links)
    config = Hogbatch(workers=3, policy=policy, threads=3, beta=0.5, gpu_depth=gpu_depth)
    tasks = plan_until(per_sample(16, numel, 1e-2), machine, config, 0.25)
    timeline = simulate(tasks, Roofline.of(machine))
    workers = [WorkerSpec("cpu", 3), WorkerSpec("gpu"), WorkerSpec("gpu")]
    asked = policy_of(config, workers, (1.0, 1.0, 1.0), 16)
    done = [updates(timeline)[name] for name in ("cpu0", "gpu1", "gpu2")]
    asks = [
        (done[worker][i - depth].ended_s if i >= depth else 0.0, min(i, depth), worker, i)
        for worker, depth in enumerate((1, gpu_depth, gpu_depth))
        for i in range(len(done[worker]))
    ]
    said, handed = [0, 0, 0], [0, 0, 0]

    def expected(other: int, worker: int, time_s: float) -> float:
        """Count all own batches, and those of other workers except an unfinished latest one."""
        return sum(
            config.weighted(workers[other], workers[other].num_updates(update.num_samples))
            for i, update in enumerate(done[other][: handed[other]])
            if update.ended_s <= time_s or other == worker or i < handed[other] - 1
        )

    for time_s, _, worker, i in sorted(asks):
        made = [expected(other, worker, time_s) for other in range(3)]
        said[worker] = asked.next_batch(worker, made, said)
        assert done[worker][i].num_samples == said[worker], (time_s, worker)
        handed[worker] += 1


@given(
    speed=st.floats(0.5, 500),
    numel=st.integers(1, 20_000),
    sample_nbytes=st.integers(0, 20_000),
    gpu_depth=st.integers(1, 3),
)
def test_the_period_of_a_gpu_is_the_simulated_one(speed, numel, sample_nbytes, gpu_depth):
    machine = at_speeds(speed, kinds=["gpu"], links=[link("gpu0", "h", 1e6)])
    config = Hogbatch(workers=1, policy="hogbatch", threads=1, gpu_depth=gpu_depth)
    work = replace(per_sample(4, numel, 1e-2), input_nbytes=sample_nbytes * 4)
    workers = PricedWorkers(work, machine, config)
    batch = workers.batch(0, 4)
    horizon_s = 150 * sum(batch.seconds)
    timeline = simulate(plan_until(work, machine, config, horizon_s), Roofline.of(machine))
    ends = [update.ended_s for update in updates(timeline)["gpu0"]]
    # If two stages take nearly the same time, the pipeline fills only after many batches.
    assert (ends[-1] - ends[-21]) / 20 == pytest.approx(batch.period_s, rel=3e-2)


@pytest.mark.parametrize("policy", POLICIES)
def test_workers_never_wait_for_each_other_and_their_rates_add_up(policy):
    machine = at_speeds(1.0, 7.3)
    timeline = run(per_sample(32), machine, Hogbatch(policy=policy, threads=2), 100.0)
    for device in ("cpu0", "cpu1"):
        spans = [span for span in timeline.spans if span.on[0].owner == device]
        assert [span.start_s for span in spans] == [0.0, *(span.end_s for span in spans)][:-1]
    # Speeds of 1 and 16, and 2 x 64 samples a step: 128 / 17 s, even if the fast worker ends many
    # batches during each batch of the slow one.
    machine, config = at_speeds(1.0, 16.0), Hogbatch(policy=policy, threads=1, cpu_batch=(1, 32))
    steps = 16 if policy in ("hogwild", "cpu_gpu") else 60  # the first two have small batches
    found = period(
        lambda n: plan(per_sample(64), machine, config, Window(n)), Roofline.of(machine), steps
    )
    assert found == pytest.approx(128 / 17, rel=0.03)


def test_a_gpu_copies_the_model_in_and_its_gradient_out():
    machine = box("cpu", "gpu", links=[link("gpu1", "h", 1000.0, 0.25)])
    tasks = plan(per_sample(2, numel=500), machine, EQUAL, Window(10))  # 4000 bytes
    spans = {span.name: span.duration_s for span in simulate(tasks, Roofline.of(machine)).spans}
    own = [task.name for task in tasks.tasks if task.id.step == 0 and task.id.worker == 1]
    seconds = {name[3:].removesuffix("@worker1"): spans[name] for name in own}
    layers = ["forward[a]", "forward[b]", "backward[b]", "backward[a]", "step"]
    assert [*seconds] == ["h2d[batch]", "h2d[model]", *layers, "d2h[update]", "reduce[update]"]
    assert seconds["h2d[batch]"] == pytest.approx(0.25 + 0.08)
    assert seconds["h2d[model]"] == seconds["d2h[update]"] == pytest.approx(4.25)
    # CPU workers use the shared model without a copy.
    kinds = {task.kind for task in tasks.tasks if task.id.worker == 0}
    assert kinds == {Kind.FORWARD, Kind.BACKWARD, Kind.STEP}


def test_a_window_ends_with_its_last_samples_and_all_workers_reach_a_horizon():
    machine = at_speeds(1.0, 300.5)
    timeline = simulate(plan(per_sample(10), machine, EQUAL, Window(4)), Roofline.of(machine))
    # The slow worker's first batch is cut off.
    assert num_samples(timeline) == {"cpu0": 0, "cpu1": 80}
    assert timeline.makespan_s == pytest.approx(80 / 300.5, rel=1e-6)
    machine = at_speeds(1.0, 30.5)
    tasks = plan_until(per_sample(10), machine, Hogbatch(policy="hogbatch"), 55.0)
    last = {span.on[0].owner: span.end_s for span in simulate(tasks, Roofline.of(machine)).spans}
    assert set(last) == {"cpu0", "cpu1"}
    assert min(last.values()) >= 55.0
    assert all(task.kind in COMPUTE for task in tasks.tasks)


@pytest.mark.parametrize(
    ("machine", "field"),
    [
        (box("cpu"), "workers"),
        (box("cpu", "gpu"), "machine box"),
        (box("cpu", "cpu", hosts="ab"), "workers"),  # a shared model requires a single host
    ],
)
def test_machines_that_cannot_share_a_model_are_refused(machine, field):
    with refused(field):
        plan(per_sample(4), machine, Hogbatch(), Window(1))


@pytest.mark.parametrize(
    ("threads", "nbytes"), [(1, (40 + 65, 80 + 105)), (3, (120 + 65, 240 + 105))]
)
def test_parameter_traffic_and_calls_do_not_shrink_with_the_batch(threads, nbytes):
    # A quarter of the batch has a quarter of the flops and of the 260 and 420 bytes of activations.
    # Each thread has the traffic of all 40 bytes of parameters, once or twice, and all calls. The
    # model's first layer only writes gradients, because inputs need no gradient.
    layer = Layer("a", (Parameter("w", (10,)),), 8, Cost(8, 300, 3), Cost(16, 500, 4))
    first = Layer("z", (Parameter("w", (10,)),), 8, Cost(), Cost(16, 460, 4))
    work = Workload("one", 12, (first, layer), (1, 0), 0)
    config = Hogbatch(workers=1, policy="cpu_gpu", cpu_batch=(3 // threads, 64), threads=threads)
    tasks = plan(work, box("cpu"), config, Window(1))
    assert tasks["s0/forward[a]@worker0"].cost == Cost(2, nbytes[0], 3)
    assert tasks["s0/backward[a]@worker0"].cost == Cost(4, nbytes[1], 4)
    assert tasks["s0/backward[z]@worker0"].cost == Cost(4, threads * 40 + 105, 4)
    assert tasks["s0/step@worker0"].cost == Cost(40 * threads, 3 * 80 * threads, 2)
    # A batch of the workload's size has the workload's costs.
    whole = plan(work, box("cpu"), replace(EQUAL, workers=1), Window(1))
    assert whole["s0/forward[a]@worker0"].cost == layer.forward
    assert whole["s0/backward[a]@worker0"].cost == layer.backward


def test_workers_share_the_hosts_threads_by_default():
    machine, work = box("cpu", "cpu"), per_sample(10, numel=100)  # 8 cores, 800 bytes
    for options, threads in (({}, 4), ({"threads": 3}, 3)):
        needed = memory(work, machine, Hogbatch(policy="hogbatch", **options))
        # Each thread has gradients; features of both layers and their gradients take 320 bytes.
        assert needed["cpu0"] == needed["cpu1"] == threads * 800 + 320


def test_memory_holds_the_largest_batch_and_one_shared_model():
    machine = box("cpu", "gpu", links=[link("gpu1", "h", 1000.0)])
    # Bytes: 800 of parameters, 80 of each layer's features, 400 of input.
    work = per_sample(10, numel=100)
    config = Hogbatch(threads=2, cpu_batch=(1, 15), gpu_batch=(1, 5))
    # For 10 samples, features of both layers and gradients of the second layer's input and output
    # take 320 bytes.
    assert memory(work, machine, config) == {
        "h": 800,
        "cpu0": 2 * 800 + 3 * 320,
        # Replica, gradients, copy of the model, two updates; samples of three batches.
        "gpu1": 5 * 800 + 160 + 3 * 200,
    }
    in_turn = replace(config, gpu_depth=1)
    assert memory(work, machine, in_turn)["gpu1"] == 4 * 800 + 160 + 200
