"""The gate of local's hub: what an honest worker sends passes, and everything else is refused."""

import json
from dataclasses import replace
from math import inf, nan

import pytest
import torch
from safetensors.torch import save
from torch import nn

from paceline.core.errors import InvalidInput
from paceline.core.plan import Kind
from paceline.core.timeline import Span
from paceline.rpc.frames import Message
from paceline.rpc.proportion import Proportions
from paceline.strategies.local.config import Local
from paceline.strategies.local.exchange import Exchanged
from paceline.strategies.local.gate import Gate, LeftOut, NotFinite, gradient_buffers
from paceline.strategies.local.protocol import Loss, PartHeader, Topic, encode, joined
from paceline.strategies.local.trace import Trace

NUM_VALUES = 4 * 3 + 3
PER_ROUND, NUM_EPOCHS, NUM_TESTS = 100.0, 5, 30
HEADER = PartHeader(weight=50, num_steps=5, losses=(Loss(epoch=1, num_samples=50, total=70.0),))


@pytest.fixture
def gate() -> Gate:
    torch.manual_seed(0)
    exchanged = Exchanged(nn.Linear(4, 3), Local())
    return Gate(exchanged, PER_ROUND, NUM_EPOCHS, NUM_TESTS, Proportions("outer gradients"))


def part(header: PartHeader, *buffers: torch.Tensor, running: bytes = b"") -> Message:
    found = header.model_copy(update={"num_buffers": len(buffers)})
    return Message(Topic.PART, parts=(encode(found), *map(joined, ([b] for b in buffers)), running))


def test_an_honest_part_arrives_as_it_was_sent(gate):
    gradient = torch.linspace(-1, 1, NUM_VALUES)
    message = part(HEADER, gradient)
    header = gate.part(message)
    assert header.losses == HEADER.losses
    values = gate.values(1, 0, header, gradient_buffers(header, message), 5)
    assert torch.equal(values, gradient)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"weight": 301}, "more samples than the 300 of 3 rounds"),
        ({"losses": [{"epoch": 1, "num_samples": 301, "total": 1.0}]}, "more samples than the 300"),
        ({"losses": [{"epoch": 5, "num_samples": 1, "total": 1.0}]}, "a loss of epoch 5 of 5"),
        ({"weight": -1}, "part: weight: "),
        ({"step_s": -1.0}, "part: step_s: "),
        ({"unheard_of": 1}, "part: unheard_of: "),
        ({"losses": [[[[]]]]}, "part: losses.0: "),
    ],
)
def test_a_header_that_cannot_be_is_refused(gate, changes: dict[str, object], why: str):
    fields = HEADER.model_dump(mode="json") | changes
    message = Message(Topic.PART, parts=(json.dumps(fields).encode(), b""))
    with pytest.raises(InvalidInput, match=why):
        gate.part(message)


@pytest.mark.parametrize("parts", [(), (b"",), (b"[" * 5000,), (b"\xff\xfe", b"")])
def test_what_is_no_part_is_refused_in_one_line(gate, parts: tuple[bytes, ...]):
    with pytest.raises(InvalidInput) as caught:
        gate.part(Message(Topic.PART, parts=parts))
    assert str(caught.value).isprintable()


def test_a_part_has_the_parts_that_its_header_says(gate):
    message = part(HEADER, torch.zeros(NUM_VALUES))
    with pytest.raises(InvalidInput, match="2 parts; a header, 1 of the gradient and one of"):
        gate.part(replace(message, parts=message.parts[:2]))


@pytest.mark.parametrize("total", [1e300, -1e300])
def test_a_loss_as_good_as_infinite_leaves_a_worker_out(gate, total: float):
    losses = (Loss(epoch=0, num_samples=2, total=total),)
    with pytest.raises(NotFinite, match="training loss"):
        gate.part(part(HEADER.model_copy(update={"losses": losses})))


def test_nan_parameters_are_told_before_the_losses_that_follow_from_them(gate):
    losses = (Loss(epoch=0, num_samples=2, total=1e300),)
    header = HEADER.model_copy(update={"losses": losses, "is_finite": False})
    with pytest.raises(NotFinite, match="has parameters that are NaN or infinite"):
        gate.part(part(header))


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_an_outer_gradient_that_is_not_finite_leaves_a_worker_out(gate, value: float):
    gradient = torch.zeros(NUM_VALUES)
    gradient[7] = value
    message = part(HEADER, gradient)
    header = gate.part(message)
    with pytest.raises(LeftOut, match="values that are NaN or infinite"):
        gate.values(1, 0, header, gradient_buffers(header, message), 5)


def test_an_outer_gradient_out_of_all_proportion_is_refused_and_the_others_are_not(gate):
    usual, huge = torch.full((NUM_VALUES,), 0.1), torch.full((NUM_VALUES,), 3e37)
    for worker, gradient, is_refused in [(0, usual, 0), (1, huge, 1), (0, usual, 0), (1, usual, 0)]:
        message = part(HEADER, gradient)
        header = gate.part(message)
        buffers = gradient_buffers(header, message)
        if is_refused:
            with pytest.raises(InvalidInput, match="out of all proportion"):
                gate.values(worker, 0, header, buffers, 5)
        else:
            assert torch.equal(gate.values(worker, 0, header, buffers, 5), gradient)


@pytest.mark.parametrize("count", [0, NUM_VALUES - 1, NUM_VALUES + 1])
def test_a_gradient_of_another_size_is_refused(gate, count: int):
    message = part(HEADER, torch.zeros(count))
    header = gate.part(message)
    with pytest.raises(InvalidInput, match="bytes in 1 buffers"):
        gate.values(1, 0, header, gradient_buffers(header, message), 5)


def test_running_means_have_their_size_and_are_finite_and_in_proportion(gate):
    like = [torch.zeros(3), torch.tensor(4)]
    own = [torch.ones(3), torch.tensor(9)]
    found = gate.buffers(part(HEADER, running=bytes(joined(own))), like)
    assert all(map(torch.equal, found, own))
    for spoilt, error, why in [
        (torch.full((3,), nan), NotFinite, "NaN or infinite"),
        (torch.full((3,), 1e30), InvalidInput, "out of all proportion"),
        (torch.ones(4), InvalidInput, "24 bytes where 20 belong"),
    ]:
        message = part(HEADER, running=bytes(joined([spoilt, own[1]])))
        with pytest.raises(error, match=why):
            gate.buffers(message, like)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"num_samples": 31, "loss": 1.0, "score": 1.0}, "31 samples, of 30 that there are"),
        ({"num_samples": 3, "loss": 1e300, "score": 1.0}, "has a test loss that is NaN"),
        ({"num_samples": 3, "loss": None, "score": 1.0}, "has a test loss that is NaN"),
        ({"num_samples": 3, "loss": "much", "score": 1.0}, "tested: loss"),
    ],
)
def test_a_test_that_cannot_be_does_not_count(gate, fields: dict[str, object], why: str):
    message = Message(Topic.TESTED, parts=(json.dumps(fields).encode(),))
    with pytest.raises((InvalidInput, LeftOut), match=why):
        gate.tested(message)


def test_a_state_is_read_before_it_is_kept(gate):
    header, tensors = b'{"round": 1, "step": 2}', save({"one": torch.ones(2)})
    good = Message(Topic.SAVED, parts=(header, tensors, b'{"rate": 0.1}'))
    assert gate.own_state(good).header.step == 2
    for parts in [
        (header, tensors[:20], b"{}"),
        (header, tensors, b"[1]"),
        (header, tensors, b"[" * 5000),
        (header, tensors),
        (b'{"round": -1, "step": 2}', tensors, b"{}"),
    ]:
        with pytest.raises(InvalidInput, match="saved"):
            gate.own_state(Message(Topic.SAVED, parts=parts))


def test_a_trace_is_of_the_worker_that_sends_it_and_of_times_that_can_be(gate):
    span = Span(Kind.FORWARD, 1, "layer", 2, (), 1.0, 2.0)
    honest = Trace(2, [span], {3: 1.0}, {3: 2.0})
    done = b'{"digest": null}'
    _, found = gate.done(2, Message(Topic.DONE, parts=(done, honest.as_json())))
    assert found == honest
    for trace in [
        replace(honest, worker=1),
        replace(honest, spans=[span._replace(worker=1)]),
        replace(honest, spans=[span._replace(end_s=0.5)]),
        replace(honest, sent_s={-1: 1.0}),
    ]:
        with pytest.raises(InvalidInput, match="trace"):
            gate.done(2, Message(Topic.DONE, parts=(done, trace.as_json())))
    with pytest.raises(InvalidInput, match="1 parts, and not 2"):
        gate.done(2, Message(Topic.DONE, parts=(done,)))
