"""Strategy subbatch: the cut of models, and plans against closed forms."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from boxes import after, box, codec_speed, link, named
from paceline.core.cluster import Cluster
from paceline.core.cost import Roofline
from paceline.core.plan import COMPUTE, Kind, Plan, Task
from paceline.core.simulate import simulate
from paceline.core.strategy import Window
from paceline.core.workload import Cost, Workload
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.head import cut, rows_per_sample
from paceline.strategies.subbatch.plan import memory, plan
from refusals import refused
from subbatches import (
    BATCH,
    CLASSES,
    CONV,
    FC1,
    FC2,
    FEATURES,
    NET,
    WIDTH,
    WIRE,
    layer,
    model,
    ring_of,
)

NORM = layer("norm", (WIDTH,), (WIDTH,), out=WIDTH, seconds=0.5)
OTHER = layer("other", (7, FEATURES), out=7)
# A token model with a norm before its head.
TOKENS, VOCABULARY = 5, 50
ATTENTION = layer("attention", (WIDTH, WIDTH), out=TOKENS * WIDTH)
TOKEN_NORM = layer("norm", (WIDTH,), (WIDTH,), out=TOKENS * WIDTH)
LM_HEAD = layer("head", (VOCABULARY, WIDTH), out=TOKENS * VOCABULARY)
LANGUAGE = model(CONV, ATTENTION, TOKEN_NORM, LM_HEAD)
CODECS = {"codecs": dict.fromkeys(("eightbit", "cast"), codec_speed(1e6, 1e6))}


def made(workload: Workload = NET, workers: int = 2, **more) -> Plan:
    return plan(workload, ring_of(workers, **CODECS), SubBatch(workers, **more), Window(1))


def spans(tasks: Plan) -> dict:
    return {span.name: span for span in simulate(tasks, Roofline.of(ring_of(2))).spans}


def computed(tasks: Iterable[Task]) -> float:
    return sum(task.cost.flops for task in tasks if task.kind in COMPUTE)


def sent(tasks: Iterable[Task]) -> float:
    return sum(task.cost.nbytes for task in tasks if task.kind not in COMPUTE)


KNOWN = [replace(FC1, kind="Linear"), replace(NORM, kind="BatchNorm1d")]
# A layer of a network of image patches: its outputs are 9 tokens per sample.
PATCHES = layer("mixed", (WIDTH, WIDTH), out=9 * WIDTH)
# The gradients of fc1 are ready last, so fc1 is not only on the path from conv to fc2.
BRANCHED = Workload("net", BATCH, (CONV, FC1, FC2), (2, 0, 1), 0)


@pytest.mark.parametrize(
    ("workload", "first", "head"),
    [
        (NET, None, ["fc1", "fc2"]),  # the longest sequence of layers that can be split
        (NET, "fc2", ["fc2"]),
        (model(CONV, FC1, NORM, FC2), None, ["fc1", "norm", "fc2"]),
        (model(CONV, *KNOWN, FC2), None, ["fc1", "norm", "fc2"]),
        (model(CONV, NORM, FC1), None, ["fc1"]),
        # fc1 does not use the outputs of `other`, which have a different size.
        (model(CONV, OTHER, FC1, FC2), None, ["fc1", "fc2"]),
        (model(FC1, FC2), None, ["fc2"]),  # the body needs a layer
        (LANGUAGE, None, ["head"]),  # a norm of tokens belongs to the body
        (model(CONV, PATCHES, NORM, FC2), None, ["fc2"]),
        # A head has no normalisation over the features of a sample.
        (model(CONV, FC1, replace(NORM, kind="LayerNorm"), FC2), None, ["fc2"]),
        (BRANCHED, None, ["fc2"]),
    ],
)
def test_the_head_of_a_model(workload, first, head):
    parts = cut(workload, first, 2)
    assert [one.name for one in parts.head.layers] == head
    assert rows_per_sample(parts) == (TOKENS if workload is LANGUAGE else 1)
    assert len(parts.body.layers) + len(head) == len(workload.layers)


def test_a_layer_that_normalises_gathers_nothing():
    names = named(plan(model(CONV, FC1, NORM, FC2), ring_of(2), SubBatch(2), Window(1)))
    assert "send[norm/0]" not in names
    assert "backward[norm:weights/0]@worker0" not in names
    assert "send[fc2/0]" in names


@pytest.mark.parametrize(
    ("workload", "config", "field", "layer"),
    [
        (model(FC1, CONV), SubBatch(2), "head", "conv"),
        (model(CONV, NORM), SubBatch(2), "head", "norm"),
        (model(FC1), SubBatch(2), "head", "fc1"),
        (model(CONV, ATTENTION, TOKEN_NORM), SubBatch(2), "head", "norm"),
        (model(CONV, replace(FC1, kind="Embedding")), SubBatch(2), "head", "fc1"),
        (model(CONV, replace(NORM, kind="Linear")), SubBatch(2), "head", "norm"),
        (LANGUAGE, SubBatch(2, head="attention"), "head", "norm"),
        (NET, SubBatch(2, head="fc9"), "head", "fc9"),
        (NET, SubBatch(2, head="conv"), "head", "conv"),  # leaves no body
        (model(FC2, CONV, FC1), SubBatch(2, head="conv"), "head", "conv"),
        (model(CONV, NORM, FC2), SubBatch(2, head="norm"), "head", "norm"),
        (BRANCHED, SubBatch(2, head="fc1"), "head", "fc1"),
        (NET, SubBatch(13), "workers", "fc2"),
    ],
)
def test_a_layer_that_cannot_be_split_is_refused_by_name(workload, config, field, layer):
    with refused(field) as caught:
        plan(workload, ring_of(13), config, Window(1))
    assert repr(layer) in str(caught.value)


def test_a_step_of_two_workers_has_exactly_these_tasks():
    own = {"load", "forward[conv]", "backward[conv]", "step"}
    shared = {"reduce[conv]", "send[labels]"}
    for number in (0, 1):
        for fc in ("fc1", "fc2"):
            own |= {f"forward[{fc}/{number}]", f"backward[{fc}/{number}]"}
            own |= {f"backward[{fc}:weights/{number}]"}
            shared |= {f"send[{fc}/{number}]", f"reduce[{fc}:activation_gradients/{number}]"}
        shared |= {f"send[loss/{number}]"}
    assert named(made()) == shared | {f"{name}@worker{w}" for name in own for w in (0, 1)}
    # Backward of the body waits for all activation gradients.
    waits = {f"s0/reduce[fc1:activation_gradients/{number}]" for number in (0, 1)}
    for worker in (0, 1):
        assert set(after(made()[f"s0/backward[conv]@worker{worker}"])) == waits


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("updates", ["step", "sub-batch"])
def test_splitting_the_head_does_not_change_the_number_of_operations(workers, updates):
    # If K does not divide the number of outputs, the largest part determines the cost.
    tasks = made(workers=workers, updates=updates).tasks
    own = [task for task in tasks if task.id.worker == 0]
    assert (sent(tasks) == 0) is (workers == 1)
    extra = {one: -(-one // workers) * workers / one for one in (WIDTH, CLASSES)}
    repeats = 1 if updates == "step" else min(workers, BATCH)
    update = FC1.num_parameters * extra[WIDTH] + FC2.num_parameters * extra[CLASSES]
    step = 4 * CONV.num_parameters + repeats * 4 * update / workers
    expected = 3e9 * (1 + extra[WIDTH] + extra[CLASSES]) + step
    assert computed(own) == pytest.approx(expected)


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize(
    ("workload", "rows", "widths"),
    [(NET, BATCH, FEATURES + WIDTH), (LANGUAGE, BATCH * TOKENS, WIDTH)],
)
def test_the_wire_carries_the_bytes_of_the_formula(workload, rows, widths, workers):
    # Each worker sends (K - 1) / K of the values that a pass gathers or returns, and twice this
    # share of the body's gradients and of a flag per parameter. A row has 12 bytes of loss values
    # and a label of 8 bytes; the header has 16 bytes.
    expected = (workers - 1) * (2 * 4 * rows * widths + 12 * rows * workers + 8 * rows + 16)
    body = cut(workload, None, workers).body
    flags = sum(4 * len(layer.parameters) for layer in body.layers)
    expected += 2 * (workers - 1) / workers * (body.gradient_nbytes + flags)
    assert sent(made(workload, workers).tasks) == pytest.approx(expected)


def test_a_worker_keeps_its_columns_of_the_logits():
    narrow = model(CONV, ATTENTION, TOKEN_NORM, layer("head", (40, WIDTH), out=TOKENS * 40))
    kept = []
    for workers in (1, 2, 5):
        wide, few = (
            memory(one, ring_of(workers), SubBatch(workers))["gpu0"] for one in (LANGUAGE, narrow)
        )
        kept.append(wide - few - 3 * 4 * WIDTH * (VOCABULARY - 40) / workers)
    # Logits of all sub-batches, i.e. of a whole batch, and their gradients for the largest
    # sub-batch, with 12, 6 and 3 samples of a worker.
    logits = BATCH * TOKENS * 4 * (VOCABULARY - 40)
    assert kept == pytest.approx([logits * (1 + own / BATCH) for own in (12, 6, 3)])


@pytest.mark.parametrize(
    ("workers", "batch_size", "sub_batch", "own"),  # own: samples of a worker in each sub-batch
    [
        (5, 12, None, [3, 3, 2, 2, 2]),
        (5, 3, None, [1, 1, 1]),  # no empty pass
        (3, 12, 36, [12]),
        (3, 12, 35, [6, 6]),
        (3, 12, 10, [3, 3, 3, 3]),
        (3, 12, 5, [2, 2, 2, 2, 1, 1, 1, 1]),
        (3, 12, 3, [1] * 12),
    ],
)
def test_the_size_of_sub_batches_determines_their_number(workers, batch_size, sub_batch, own):
    tasks = made(replace(NET, batch_size=batch_size), workers, sub_batch=sub_batch).tasks
    whole = made(replace(NET, batch_size=batch_size), workers).tasks
    passes = [t for t in tasks if t.part == "fc1" and t.kind is Kind.SEND]
    nbytes = (workers - 1) * FEATURES * 4 * BATCH / batch_size
    found = {t.id.sub_batch: t.cost.nbytes for t in passes}
    assert found == {i: pytest.approx(nbytes * n) for i, n in enumerate(own)}
    # The size changes neither arithmetic nor bytes.
    assert (computed(tasks), sent(tasks)) == pytest.approx((computed(whole), sent(whole)))


@pytest.mark.parametrize("sub_batch", [2, 37])
def test_a_sub_batch_without_a_sample_of_each_worker_or_above_a_step_is_refused(sub_batch: int):
    with refused("sub_batch", got=sub_batch):
        made(workers=3, sub_batch=sub_batch)


@pytest.mark.parametrize("num_passes", [1, 2, 4])
def test_each_sub_batch_reads_the_weights_again(num_passes: int):
    # Forward and both products of backward read or write weights or their gradients. From the
    # second sub-batch on, gradients are accumulated.
    weights, rest = FC1.gradient_nbytes, 1000.0
    costs = {"forward": Cost(0, weights + rest), "backward": Cost(0, 2 * weights + rest)}
    tasks = made(model(CONV, replace(FC1, **costs)), sub_batch=24 // num_passes).tasks
    own = [t for t in tasks if t.part.startswith("fc1") and t.id.worker == 0 and t.kind in COMPUTE]
    expected = num_passes * 3 * weights / 2 + (num_passes - 1) * 2 * weights / 2
    assert sum(task.cost.nbytes for task in own) == pytest.approx(expected + 2 * rest)


def test_sub_batches_overlap():
    parts = spans(made())
    first, next_sent = parts["s0/forward[fc1/0]@worker0"], parts["s0/send[fc1/1]"]
    assert next_sent.start_s < first.end_s
    assert first.start_s < next_sent.end_s
    # The exchange of the body's gradients overlaps its backward.
    deep = model(layer("a", (10, 10), out=4), layer("b", (4, 4, 1, 1), out=FEATURES), FC1)
    parts = spans(made(deep))
    assert parts["s0/reduce[b]"].start_s == parts["s0/backward[b]@worker0"].end_s
    assert parts["s0/reduce[b]"].start_s < parts["s0/backward[a]@worker0"].end_s


@pytest.mark.parametrize("updates", ["step", "sub-batch"])
def test_a_sub_batch_waits_for_updates_per_sub_batch_but_not_per_step(updates):
    waits = after(made(updates=updates)["s0/forward[fc1/1]@worker1"])
    assert ("s0/backward[fc1:weights/0]@worker1" in waits) is (updates == "sub-batch")


def test_each_direction_has_its_own_codec():
    tasks = made(activations="dynamic8", activation_gradients="half")
    values = BATCH // 2 * FEATURES
    # Each worker sends half of the values: with 8 bits and a scale, or with 16 bits.
    assert tasks["s0/send[fc1/0]"].cost.nbytes == values + 4
    assert tasks["s0/reduce[fc1:activation_gradients/0]"].cost.nbytes == 2 * values
    assert tasks["s0/encode[fc1/0]@worker0"].cost.flops == values
    assert tasks["s0/decode[fc1/0]@worker1"].cost.flops == 2 * values
    assert tasks["s0/encode[fc1:activation_gradients/0]@worker1"].cost.flops == 2 * values
    assert after(tasks["s0/forward[fc1/0]@worker1"]) == ("s0/decode[fc1/0]@worker1",)
    assert "encode[conv]@worker0" not in named(tasks)
    # Gradients of the body can be the only encoded values.
    tasks = made(gradients="dynamic8")
    assert {task.part for task in tasks.tasks if task.kind is Kind.ENCODE} == {"conv.0"}
    assert "s0/decode[conv.0]@worker1" in after(tasks["s0/step@worker1"])


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_the_workers_share_the_biases_of_the_head(workers):
    needed = memory(NET, ring_of(workers), SubBatch(workers))
    wide = model(CONV, layer("fc1", (WIDTH, FEATURES), out=WIDTH), FC2)
    without = memory(wide, ring_of(workers), SubBatch(workers))
    # The workers share 24 biases of fc1, each with its gradient and momentum. The first workers
    # have one more if the number does not divide.
    for rank, device in enumerate(needed):
        own = WIDTH // workers + (rank < WIDTH % workers)
        assert needed[device] - without[device] == pytest.approx(3 * 4 * own, abs=1)


def test_updates_per_sub_batch_need_less_memory():
    whole, each = (
        memory(NET, ring_of(4), SubBatch(4, updates=updates))["gpu0"]
        for updates in ("step", "sub-batch")
    )
    # Each of four workers has a quarter of the last layer's outputs.
    features = FC1.activation_nbytes + CONV.activation_nbytes + FC2.activation_nbytes / 4
    assert whole - each == 2 * features


@pytest.mark.parametrize("codec", [None, "dynamic8"])
def test_a_plan_of_representative_nodes_equals_the_plan_of_all(codec):
    node = box("gpu", "gpu", links=[link(f"gpu{i}", "h", 2e3) for i in (0, 1)], device=CODECS)
    level = {"bandwidth_bytes_per_s": WIRE, "latency_s": 0.1, "source": "made up"}
    levels = [level | {"name": "fabric", "count": 6}]
    cluster = Cluster.model_validate({**node.model_dump(), "levels": levels})
    config, found = SubBatch(10, activations=codec, activation_gradients=codec), []
    for symmetric in (False, True):
        machine = cluster.for_workers(10, symmetric=symmetric)
        needed = memory(NET, machine, config)
        tasks = plan(NET, machine, config, Window(2))
        found.append((needed, simulate(tasks, Roofline.of(machine)).makespan_s))
    (every, every_s), (alike, alike_s) = found
    assert every_s == pytest.approx(alike_s, rel=1e-9)
    # Ten does not divide the number of outputs, so the first devices have larger shares.
    assert len(alike) == 2 < len(every) == 10
    assert alike.items() <= every.items()
    assert max(alike.values()) == max(every.values())
