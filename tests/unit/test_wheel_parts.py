"""Parts of wheel's body processes: turns, shares, batches, encoded values, timelines."""

from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from paceline.core.cost import compute_lane
from paceline.core.errors import NonFinite
from paceline.core.plan import Kind
from paceline.core.reading import read_record
from paceline.core.timeline import Span, Timeline
from paceline.core.wire_format import Purpose
from paceline.links.turns import LaneStopped, Turns
from paceline.record.worker_trace import MessageTime, Trace, timeline_of, utilisation
from paceline.rpc.batch_layout import BatchLayout
from paceline.rpc.frames import Message
from paceline.rpc.tensor_parts import CopyLane, Endpoint, values_of
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.protocol import check_codecs
from paceline.strategies.wheel.split import TO_HUB
from paceline.training.data.batch import Batch, SampleShare
from paceline.training.data.dataset import TensorSamples
from paceline.training.data.sampler import ShardedBatches
from paceline.training.recipes.recipe import Recipe
from refusals import refused
from rpc_exchange import beside

DEADLINE_S = 20.0


def together(*works: Callable[[], object]) -> None:
    for done in [beside(work) for work in works]:
        done.result(DEADLINE_S)


def test_turns_go_round_in_order_until_a_lane_leaves():
    turns, said, inside = Turns([3, 1, 2]), [], []

    def lane(number: int, times: int) -> None:
        for _ in range(times):
            with turns.of(number):
                inside.append(number)
                said.append((number, list(inside)))
                inside.remove(number)
        turns.leave(number)

    together(*(lambda n=n, t=t: lane(n, t) for n, t in ((2, 3), (1, 1), (3, 2))))
    assert [number for number, _ in said] == [3, 1, 2, 3, 2, 2]
    assert all(alone == [number] for number, alone in said)


def test_no_lane_waits_for_one_that_cannot_use_its_turn_or_has_left():
    """For example after a restart of the hub, which waits for the lanes in any order."""
    turns, said = Turns([0, 1]), []

    def other() -> None:
        for _ in range(2):
            with turns.of(1):
                said.append(1)

    with turns.of(0):
        beside(other)
        while len(said) < 2:
            turns.let_others(0)
    turns.leave(0)
    beside(other).result(DEADLINE_S)
    turns.leave(1)
    with turns.of(0):  # a lane that has left may return
        said.append(0)
    assert said == [1, 1, 1, 1, 0]


def test_a_failure_of_one_lane_stops_waiting_lanes():
    turns = Turns([0, 1])

    def waits() -> None:
        with pytest.raises(LaneStopped), turns.of(1):
            raise AssertionError("lane 0 has never had its turn")

    together(waits, turns.stop)
    with pytest.raises(LaneStopped):
        turns.check()


def test_a_share_has_the_rows_of_the_sampler_for_all_steps_in_any_order():
    samples = TensorSamples(torch.arange(60.0)[:, None], torch.zeros(60, dtype=torch.int64))
    share, batches = SampleShare(samples, 7, 1, 2, 393, 3), ShardedBatches(60, 7, 1, 2, 3)
    rows = list[list[int]]()
    for epoch in range(44):
        batches.set_epoch(epoch)
        rows += batches
    assert [share.rows(step) for step in reversed(range(393))] == rows[392::-1]
    # A run limited by steps may end within an epoch.
    assert [step for step in range(393) if share.ends_epoch(step)] == [*range(8, 393, 9), 392]
    inputs, _ = share.batch(12)
    assert inputs[:, 0].tolist() == rows[12]


def endpoint(dtype: torch.dtype = torch.float32, **codecs: str) -> Endpoint:
    return Endpoint(Wheel(**codecs).codecs, dtype, MagicMock(), CopyLane(torch.device("cpu")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_without_a_codec_arrive_unchanged(dtype: torch.dtype):
    values, end = torch.randn(5, 7, dtype=dtype).t(), endpoint(dtype)
    message = end.message(Purpose.ACTIVATIONS, 0, 0, values)
    assert message.nbytes == values.numel() * dtype.itemsize
    came = end.values(Purpose.ACTIVATIONS, message, 0.0, 35)
    assert torch.equal(came.view(7, 5), values)


def test_values_that_do_not_fit_or_are_not_finite_are_refused():
    sent = Message("activation_gradients", parts=(bytearray(12),))
    for end, field in (
        (endpoint(), "activation_gradients"),
        (endpoint(activation_gradients="half"), "payload"),
    ):
        with refused(field):
            end.values(Purpose.ACTIVATION_GRADIENTS, sent, 0.0, 4)
    values = torch.tensor([1.0, 2.0, float("nan"), 3.0])
    with pytest.raises(NonFinite, match="activation_gradients"):
        endpoint(activation_gradients="half").message(Purpose.ACTIVATION_GRADIENTS, 0, 0, values)
    with refused("codec"):  # no messages are compared to choose a codec
        check_codecs(Wheel(gradients="auto"), torch.float32)
    check_codecs(Wheel(), torch.float64)
    with refused("codec"):  # no codec encodes float64
        check_codecs(Wheel(activations="half"), torch.float64)


def test_a_trace_is_sent_as_json_and_its_clock_offset_removed():
    span = Span(Kind.LOAD, 0, "", 0, (compute_lane("cpu1"),), 10.0, 11.0)
    record = Trace([span], [MessageTime("labels", 0, 0, 11.0)], [])
    found = Trace()
    read = read_record(TypeAdapter(Trace), record.as_json(), "trace")
    found.add(read, ahead_s=4.0)
    assert found.spans == [span._replace(start_s=6.0, end_s=7.0)]
    assert found.sent == [MessageTime("labels", 0, 0, 7.0)]
    with refused("trace"):
        read_record(TypeAdapter(Trace), b'{"spans": 3}', "trace")


def test_overlapping_messages_use_the_wire_in_order_of_arrival():
    times = [
        ("gradients", 0, 0.0, 5.0),
        ("labels", 1, 1.0, 3.0),
        ("activations", 1, 1.0, 3.0),
        ("activation_gradients", 1, 4.0, 6.0),
    ]
    record = Trace(
        sent=[MessageTime(what, worker, 0, sent_s) for what, worker, sent_s, _ in times],
        received=[MessageTime(what, worker, 0, came_s) for what, worker, _, came_s in times],
    )
    timeline = timeline_of(record, {0: "cpu1", 1: "cpu1"}, TO_HUB, 0.5)
    spans = {span.name: (span.start_s, span.end_s) for span in timeline.spans}
    first = 1.0  # start of the first message, and of the timeline
    assert spans == {
        "s0/send[labels]@worker1": (1.0 - first, 2.0 - first),
        "s0/send[activations]@worker1": (2.0 - first, 3.0 - first),
        "s0/send[gradients]@worker0": (3.0 - first, 5.0 - first),
        "s0/send[activation_gradients]@worker1": (4.0 - first, 6.0 - first),
    }


F, E = Kind.FORWARD, Kind.ENCODE


@pytest.mark.parametrize(
    ("rows", "share"),
    [
        # A device is idle between its layers.
        ([(F, 0, 2.0, 4.0), (E, 0, 4.0, 5.0), (F, 0, 7.0, 10.0)], 5 / 8),
        # Both lanes are traced only from 4 s to 9 s.
        ([(F, 0, 0.0, 2.0), (F, 1, 4.0, 6.0), (F, 0, 7.0, 9.0), (F, 1, 13.0, 14.0)], 4 / 5),
    ],
)
def test_idle_is_counted_while_all_lanes_of_a_device_are_traced(rows, share: float):
    lane = (compute_lane("cpu1"),)
    spans = [
        Span(kind, i, "a", worker, lane, start, end)
        for i, (kind, worker, start, end) in enumerate(rows)
    ]
    timeline = Timeline(spans, "measured")
    assert utilisation(timeline, ["cpu1", "cpu2"]) == {"cpu1": pytest.approx(share)}


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def recipe_of(samples: list[Any], **more: Any) -> Recipe:
    kept = {"model": nn.Module, "loss": lambda outputs, targets: outputs, "name": "own"}
    return Recipe(train=samples, **kept, **more)


def tensors(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return (100 * torch.rand(shape)).to(dtype)


def nbytes_of(layout: BatchLayout, batch: Batch) -> int:
    return sum(part.nbytes for part in layout.parts(batch))


def sent(layout: BatchLayout, batch: Batch, count: int) -> Any:
    """Return a batch's targets after sending them to the hub."""
    parts = layout.parts(layout.check(batch))
    assert len(parts) == layout.num_parts
    layout.check_parts(parts, count)
    buffers = [values_of(part, torch.uint8, part.nbytes) for part in parts]
    return layout.targets(buffers, count)


LEAVES = st.tuples(st.lists(st.integers(0, 3), max_size=3).map(tuple), st.sampled_from(DTYPES)).map(
    lambda of: tensors(*of)
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3)
    ),
    max_leaves=5,
)


@given(TREES, st.integers(1, 4), st.booleans())
def test_targets_of_any_structure_arrive_unchanged(tree: Any, count: int, is_whole: bool):
    """A sample that is a mapping is its own target."""
    recipe = recipe_of([{"all": tree} if is_whole else (torch.zeros(2), tree)] * count)
    batch, layout = Batch.of(recipe.samples.__getitems__(range(count))), BatchLayout(recipe)
    found, structure = tree_flatten(sent(layout, batch, count))
    expected, other = tree_flatten(batch.inputs if is_whole else batch.targets)
    assert structure == other
    assert nbytes_of(layout, batch) == recipe.target_nbytes(count)
    for one, two in zip(found, expected, strict=True):
        assert (one.dtype, one.shape) == (two.dtype, two.shape)
        assert torch.equal(one, two)


def test_class_labels_have_the_bytes_of_table_1_and_other_numbers_their_own():
    samples = [(torch.zeros(2), torch.tensor(i % 5)) for i in range(10)]
    classes, numbers = recipe_of(samples, num_classes=5), recipe_of(samples)
    assert (classes.target_nbytes(3), numbers.target_nbytes(3)) == (None, 24)
    for recipe, nbytes in ((classes, 4), (numbers, 8)):
        batch = Batch.of(recipe.samples.__getitems__([4, 2]))
        assert nbytes_of(BatchLayout(recipe), batch) == 2 * nbytes
        assert torch.equal(sent(BatchLayout(recipe), batch, 2), torch.tensor([4, 2]))
    for label in (5, -1):  # on a GPU, it would end the hub
        with refused("targets"):
            sent(BatchLayout(classes), Batch(torch.zeros(1, 2), torch.tensor([label])), 1)


SAMPLE = {"ids": torch.arange(3), "score": torch.tensor(0.5)}


@pytest.mark.parametrize(
    "wrong",
    [
        {"ids": torch.zeros(2, 4, dtype=torch.int64), "score": torch.zeros(2)},
        {"ids": torch.zeros(2, 3, dtype=torch.int32), "score": torch.zeros(2)},
        {"ids": torch.zeros(2, 3, dtype=torch.int64)},
        {"ids": torch.zeros(2, 3, dtype=torch.int64), "score": torch.zeros(2), "more": SAMPLE},
        torch.zeros(2, 3),
    ],
)
def test_batches_unlike_the_first_sample_and_empty_targets_are_refused(wrong: Any):
    with refused("own"):
        BatchLayout(recipe_of([SAMPLE] * 4)).check(Batch(wrong, wrong))
    with refused("own"):
        BatchLayout(recipe_of([(torch.zeros(2), ())]))


def test_too_few_or_too_many_bytes_are_refused_with_the_target():
    layout = BatchLayout(recipe_of([SAMPLE] * 4))
    ids, scores = (memoryview(bytes(size)) for size in (2 * 24, 2 * 4))
    layout.check_parts((ids, scores), 2)
    for leaf, parts, count in (
        ("ids", (ids[:-1], scores), 2),
        ("ids", (ids, scores), 3),
        ("score", (ids, ids), 2),
    ):
        with refused(f"targets['{leaf}']"):
            layout.check_parts(parts, count)
