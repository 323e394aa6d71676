from dataclasses import replace

import pytest

from boxes import ExchangeOnly, after, box, link, named
from paceline.core.cluster import Cluster
from paceline.core.cost import Roofline, update_cost
from paceline.core.errors import InvalidInput
from paceline.core.plan import COMPUTE, Kind, Plan
from paceline.core.simulate import period, simulate
from paceline.core.strategy import Window
from paceline.core.workload import Cost, Workload
from paceline.records.catalogue import by_name
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.plan import memory, plan
from subbatches import (
    ATTENTION,
    BATCH,
    CLASSES,
    CONV,
    FC1,
    FC2,
    FEATURES,
    LANGUAGE,
    NET,
    TOKEN_NORM,
    TOKENS,
    VOCABULARY,
    WIDTH,
    WIRE,
    layer,
    model,
    ring_of,
)


def made(workload: Workload = NET, workers: int = 2, **more) -> Plan:
    return plan(workload, ring_of(workers), SubBatch(workers, **more), Window(1))


def test_two_workers_have_these_tasks_and_no_others():
    own = {"load", "forward[conv]", "backward[conv]", "step"}
    shared = {"reduce[conv]", "send[labels]"}
    for number in (0, 1):
        for fc in ("fc1", "fc2"):
            own |= {f"forward[{fc}/{number}]", f"backward[{fc}/{number}]"}
            own |= {f"backward[{fc}:weights/{number}]"}
            shared |= {f"send[{fc}/{number}]", f"reduce[{fc}:activation_gradients/{number}]"}
        shared |= {f"send[loss/{number}]"}
    assert named(made()) == shared | {f"{name}@worker{w}" for name in own for w in (0, 1)}


def test_one_worker_exchanges_nothing_and_computes_as_if_alone():
    tasks = made(workers=1)
    assert {task.kind for task in tasks.tasks} <= COMPUTE
    machine = ring_of(1)
    seconds = simulate(tasks, Roofline.of(machine)).makespan_s
    assert seconds == pytest.approx(9.0 + update_cost(NET).flops / 1e9)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("updates", ["step", "sub-batch"])
def test_splitting_the_head_changes_no_arithmetic(workers, updates):
    # Only where K does not divide the outputs does the largest part count for all.
    tasks = made(workers=workers, updates=updates).tasks
    own = [task for task in tasks if task.name.endswith("@worker0") and task.kind in COMPUTE]
    flops = sum(task.cost.flops for task in own)
    extra = {one: -(-one // workers) * workers / one for one in (WIDTH, CLASSES)}
    head = 3e9 * (extra[WIDTH] + extra[CLASSES])
    updated = [4 * update.num_parameters for update in (FC1, FC2)]
    repeats = 1 if updates == "step" else min(workers, BATCH)
    step = 4 * CONV.num_parameters + repeats * (
        updated[0] * extra[WIDTH] / workers + updated[1] * extra[CLASSES] / workers
    )
    assert flops == pytest.approx(3e9 + head + step)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_the_wire_carries_what_the_formula_says(workers):
    # Each worker sends (K - 1) / K of all that a pass gathers or returns, and of the convolution's
    # gradients twice that, with a flag for each of its two parameters. The loss costs 12 bytes a
    # sample, its label 8, and their header 16.
    tasks = made(workers=workers).tasks
    features = BATCH * 4 * (FEATURES + WIDTH)
    expected = (workers - 1) * (2 * features + 12 * BATCH * workers + 8 * BATCH + 16)
    expected += 2 * (workers - 1) / workers * (CONV.gradient_nbytes + 2 * 4)
    assert sum(task.cost.nbytes for task in tasks if task.kind not in COMPUTE) == pytest.approx(
        expected
    )


@pytest.mark.parametrize("workers", [2, 3])
def test_of_tokens_each_has_a_row(workers):
    tasks = plan(LANGUAGE, ring_of(workers), SubBatch(workers), Window(1))
    sent = dict.fromkeys(("labels", "loss", "head", "head:activation_gradients"), 0.0)
    for task in tasks.tasks:
        if task.part in sent and task.kind not in COMPUTE:
            sent[task.part] += task.cost.nbytes / (workers - 1)
    rows = BATCH * TOKENS
    assert sent == pytest.approx(
        {
            "labels": 16 + 8 * rows,
            "loss": 12 * rows * workers,
            "head": 4 * WIDTH * rows,
            "head:activation_gradients": 4 * WIDTH * rows,
        }
    )


def test_a_worker_keeps_its_columns_of_the_logits():
    narrow = model(CONV, ATTENTION, TOKEN_NORM, layer("head", (40, WIDTH), out=TOKENS * 40))
    kept = []
    for workers in (1, 2, 5):
        both = (memory(one, ring_of(workers), SubBatch(workers)) for one in (LANGUAGE, narrow))
        wide, few = both
        state = 3 * 4 * WIDTH * (VOCABULARY - 40) / workers
        kept.append(wide["gpu0"] - few["gpu0"] - state)
    # All sub-batches' logits, which are a whole batch's, and the gradients by those of the largest,
    # of 12, 6 and 3 of a worker's samples.
    logits = BATCH * TOKENS * 4 * (VOCABULARY - 40)
    assert kept == pytest.approx([logits * (1 + own / BATCH) for own in (12, 6, 3)])


def test_the_head_never_exchanges_its_gradients():
    wide = model(CONV, layer("fc1", (10**6, FEATURES), out=WIDTH))
    narrow = model(CONV, layer("fc1", (10, FEATURES), out=WIDTH))
    sent = [
        sum(task.cost.nbytes for task in made(one).tasks if task.kind not in COMPUTE)
        for one in (wide, narrow)
    ]
    assert sent[0] == sent[1]


def test_uneven_sub_batches_send_what_they_have():
    tasks = made(workers=5)  # 12 samples: 3, 3, 2, 2, 2 of each worker
    sent = [tasks[f"s0/send[fc1/{i}]"].cost.nbytes for i in range(5)]
    assert sent == [pytest.approx(4 * n * FEATURES * 4) for n in (3, 3, 2, 2, 2)]


def test_more_workers_than_samples_make_no_empty_pass():
    few = Workload("few", 3, NET.layers, NET.backward_order, 0)
    assert "send[fc1/2]" in named(made(few, workers=5))
    assert "send[fc1/3]" not in named(made(few, workers=5))


@pytest.mark.parametrize(
    ("sub_batch", "own"),  # 36 samples of three workers, and what each gives to every sub-batch
    [(36, [12]), (35, [6, 6]), (18, [6, 6]), (12, [4, 4, 4]), (10, [3, 3, 3, 3]), (3, [1] * 12)],
)
def test_as_many_sub_batches_as_their_size_makes(sub_batch: int, own: list[int]):
    tasks = made(workers=3, sub_batch=sub_batch)
    sent = {
        t.sub_batch: t.cost.nbytes for t in tasks.tasks if t.part == "fc1" and t.kind is Kind.SEND
    }
    assert sent == {i: pytest.approx(2 * n * FEATURES * 4) for i, n in enumerate(own)}


@pytest.mark.parametrize("sub_batch", [2, 37])
def test_a_sub_batch_smaller_than_its_workers_or_larger_than_the_step_is_refused(sub_batch: int):
    with pytest.raises(InvalidInput, match=r"sub_batch: .* from 3 to 36"):
        made(workers=3, sub_batch=sub_batch)


@pytest.mark.parametrize("sub_batch", [3, 5, 12, 36])
def test_a_size_changes_no_arithmetic_and_no_bytes(sub_batch: int):
    def totals(plan: Plan) -> list[float]:
        flops = sum(task.cost.flops for task in plan.tasks if task.kind in COMPUTE)
        return [flops, sum(task.cost.nbytes for task in plan.tasks if task.kind not in COMPUTE)]

    assert totals(made(workers=3, sub_batch=sub_batch)) == pytest.approx(totals(made(workers=3)))


@pytest.mark.parametrize("num_passes", [1, 2, 4])
def test_each_sub_batch_reads_the_weights_anew(num_passes: int):
    # Forward and both products of backward touch them; and from the second on gradients add up.
    weights, rest = FC1.gradient_nbytes, 1000.0
    costs = (Cost(0, weights + rest), Cost(0, 2 * weights + rest))
    net = model(CONV, replace(FC1, forward=costs[0], backward=costs[1]))
    tasks = plan(net, ring_of(2), SubBatch(2, sub_batch=24 // num_passes), Window(1)).tasks
    own = [t for t in tasks if t.part.startswith("fc1") and t.worker == 0 and t.kind in COMPUTE]
    found = sum(task.cost.nbytes for task in own)
    expected = num_passes * 3 * weights / 2 + (num_passes - 1) * 2 * weights / 2
    assert found == pytest.approx(expected + 2 * rest)


def test_a_sub_batch_as_large_as_the_step_hides_nothing():
    machine, times = ring_of(3), {}
    for sub_batch in (12, 36):
        config = SubBatch(3, sub_batch=sub_batch)
        times[sub_batch] = simulate(plan(NET, machine, config, Window(1)), Roofline.of(machine))
    assert times[12].makespan_s < times[36].makespan_s


def test_the_next_sub_batch_is_on_its_way_while_one_is_computed():
    machine = ring_of(2)
    spans = {s.name: s for s in simulate(made(), Roofline.of(machine)).spans}
    first, sent = spans["s0/forward[fc1/0]@worker0"], spans["s0/send[fc1/1]"]
    assert sent.start_s < first.end_s
    assert first.start_s < sent.end_s


def test_updates_per_sub_batch_are_waited_for():
    tasks = made(updates="sub-batch")
    assert "s0/backward[fc1:weights/0]@worker1" in after(tasks["s0/forward[fc1/1]@worker1"])
    assert "s0/backward[fc1:weights/0]@worker1" not in after(made()["s0/forward[fc1/1]@worker1"])


@pytest.mark.parametrize("nbytes_per_s", [100.0, 1000.0, 1e5])
def test_updates_per_step_overlap_at_least_as_much(nbytes_per_s):
    machine = ring_of(4, nbytes_per_s)
    step, each = (
        period(
            lambda n, updates=updates: plan(NET, machine, SubBatch(4, updates=updates), Window(n)),
            Roofline.of(machine),
            2,
        )
        for updates in ("step", "sub-batch")
    )
    assert step <= each * (1 + 1e-6)


def test_an_infinitely_fast_network_makes_workers_as_fast_as_one():
    times = {}
    for workers in (1, 4):
        machine = ring_of(workers, 1e18)
        steps = made(workers=workers)
        times[workers] = simulate(steps, Roofline.of(machine)).makespan_s
    assert times[4] == pytest.approx(times[1], rel=1e-5)


def test_the_gradients_of_the_body_hide_behind_its_backward():
    deep = model(layer("a", (10, 10), out=4), layer("b", (4, 4, 1, 1), out=FEATURES), FC1)
    machine = ring_of(2)
    spans = {s.name: s for s in simulate(made(deep), Roofline.of(machine)).spans}
    assert spans["s0/reduce[b]"].start_s == spans["s0/backward[b]@worker0"].end_s
    assert spans["s0/reduce[b]"].start_s < spans["s0/backward[a]@worker0"].end_s


def test_nothing_of_the_body_goes_back_before_all_errors_are_there():
    for worker in (0, 1):
        waits = after(made()[f"s0/backward[conv]@worker{worker}"])
        assert set(waits) == {
            "s0/reduce[fc1:activation_gradients/0]",
            "s0/reduce[fc1:activation_gradients/1]",
        }


SPEED = {"encode_values_per_s": 1e6, "decode_values_per_s": 1e6}


def test_each_direction_has_a_codec_of_its_own():
    device = {"codecs": {"eightbit": SPEED, "cast": SPEED}}
    config = SubBatch(2, activations="dynamic8", activation_gradients="half")
    tasks = plan(NET, ring_of(2, **device), config, Window(1))
    values = BATCH // 2 * FEATURES
    # Each worker sends half of what travels: its own values of 8 bits and a scale, or of 16 bits.
    assert tasks["s0/send[fc1/0]"].cost.nbytes == values + 4
    assert tasks["s0/reduce[fc1:activation_gradients/0]"].cost.nbytes == 2 * values
    assert tasks["s0/encode[fc1/0]@worker0"].cost.flops == values
    assert tasks["s0/decode[fc1/0]@worker1"].cost.flops == 2 * values
    assert tasks["s0/encode[fc1:activation_gradients/0]@worker1"].cost.flops == 2 * values
    assert after(tasks["s0/forward[fc1/0]@worker1"]) == ("s0/decode[fc1/0]@worker1",)
    assert "encode[conv]@worker0" not in named(tasks)


def test_gradients_of_the_body_can_be_encoded_alone():
    device = {"codecs": {"eightbit": SPEED}}
    tasks = plan(NET, ring_of(2, **device), SubBatch(2, gradients="dynamic8"), Window(1))
    encoded = {task.part for task in tasks.tasks if task.kind is Kind.ENCODE}
    assert encoded == {"conv.0"}
    assert "s0/decode[conv.0]@worker1" in after(tasks["s0/step@worker1"])


def test_gathering_takes_as_long_as_a_ring_does():
    # Three workers gather 4 samples each: two messages of 4 x 20 values of 4 bytes.
    machine = ring_of(3)
    spans = {s.name: s for s in simulate(made(workers=3), ExchangeOnly(machine)).spans}
    assert spans["s0/send[fc1/0]"].duration_s == pytest.approx(2 * 4 * FEATURES * 4 / WIRE)


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_each_device_holds_its_part_of_the_head(workers):
    needed = memory(NET, ring_of(workers), SubBatch(workers))
    wide = model(CONV, layer("fc1", (WIDTH, FEATURES), out=WIDTH), FC2)
    without = memory(wide, ring_of(workers), SubBatch(workers))
    # Biases of fc1: 24 values, each with its gradient and momentum, shared out among the workers.
    assert sum(needed.values()) - sum(without.values()) == pytest.approx(3 * 4 * WIDTH, abs=workers)
    assert max(needed.values()) - min(needed.values()) <= 3 * 4 * (FEATURES + WIDTH + 2)


def test_a_head_too_large_for_one_device_is_a_kth_on_each():
    huge = model(CONV, layer("fc1", (10**6, FEATURES), out=WIDTH))
    alone = memory(huge, ring_of(1), SubBatch(1))["gpu0"]
    split = memory(huge, ring_of(4), SubBatch(4))["gpu0"]
    assert split == pytest.approx(alone / 4, rel=1e-2)


def test_updates_per_sub_batch_keep_less():
    keeps = [
        memory(NET, ring_of(4), SubBatch(4, updates=updates))["gpu0"]
        for updates in ("step", "sub-batch")
    ]
    # Of the last layer's outputs a worker has a quarter.
    assert keeps[0] - keeps[1] == 2 * (FC1.activation_nbytes + CONV.activation_nbytes) + (
        2 * FC2.activation_nbytes / 4
    )


@pytest.mark.parametrize("codec", [None, "dynamic8"])
def test_one_node_stands_for_all_of_a_cluster(codec):
    speed = {"codecs": {"eightbit": SPEED}}
    node = box("gpu", "gpu", links=[link("gpu0", "h", 2e3), link("gpu1", "h", 2e3)], device=speed)
    fabric = {
        "name": "fabric", "count": 6, "bandwidth_bytes_per_s": WIRE, "latency_s": 0.1,
        "source": "made up",
    }  # fmt: skip
    cluster = Cluster.model_validate({**node.model_dump(), "levels": [fabric]})
    config = SubBatch(12, activations=codec, activation_gradients=codec)
    spans, needed = [], []
    for symmetric in (False, True):
        machine = cluster.for_workers(12, symmetric=symmetric)
        needed.append(max(memory(NET, machine, config).values()))
        tasks = plan(NET, machine, config, Window(2))
        spans.append(simulate(tasks, Roofline.of(machine)).makespan_s)
    assert spans[0] == pytest.approx(spans[1], rel=1e-9)
    assert needed[0] == needed[1]


@pytest.mark.parametrize("field", ["activations", "activation_gradients"])
@pytest.mark.parametrize("codec", ["auto", "threshold:0.1", "zip"])
def test_activations_have_a_codec_of_fixed_size(field, codec):
    with pytest.raises(InvalidInput, match=r"choose one of dynamic8"):
        SubBatch(2, **{field: codec})


@pytest.mark.parametrize("field", ["activations", "activation_gradients"])
@pytest.mark.parametrize("codec", ["onebit", "e3m0+feedback"])
def test_activations_have_no_codec_that_remembers(field, codec):
    with pytest.raises(InvalidInput, match=r"adds its residual to the next values"):
        SubBatch(2, **{field: codec})


def test_on_a_cluster_one_node_needs_what_each_needs():
    # The head's outputs do not divide by eight: the first devices have the larger shares.
    whole = by_name("2x4xv100+25gbe")
    assert isinstance(whole, Cluster)
    config = SubBatch(8)
    found = memory(NET, whole.for_workers(8, symmetric=True), config)
    expected = memory(NET, whole.for_workers(8), config)
    assert len(found) == 4 < len(expected) == 8
    assert found.items() <= expected.items()
    assert max(found.values()) == max(expected.values())
