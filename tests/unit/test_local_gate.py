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
from refusals import refused

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


def values(gate: Gate, gradient: torch.Tensor, worker: int = 1) -> torch.Tensor:
    """Return the values of a gradient after its way through the gate."""
    message = part(HEADER, gradient)
    header = gate.part(message)
    assert header.losses == HEADER.losses
    return gate.values(worker, 0, header, gradient_buffers(header, message), 5)


def loss(epoch: int = 0, num_samples: int = 2, total: float = 1.0) -> dict[str, object]:
    return {"losses": [{"epoch": epoch, "num_samples": num_samples, "total": total}]}


def test_an_honest_part_arrives_as_it_was_sent(gate):
    gradient = torch.linspace(-1, 1, NUM_VALUES)
    assert torch.equal(values(gate, gradient), gradient)


@pytest.mark.parametrize(
    "changes",
    [
        {"weight": 301},
        {"weight": -1},
        {"step_s": -1.0},
        {"unheard_of": 1},
        {"losses": [[[[]]]]},
        loss(num_samples=301),
        loss(epoch=5),
    ],
)
def test_a_header_that_cannot_be_is_refused(gate, changes: dict[str, object]):
    """At most the samples of three rounds, and epochs of the run."""
    fields = HEADER.model_dump(mode="json") | changes
    with refused("part"):
        gate.part(Message(Topic.PART, parts=(json.dumps(fields).encode(), b"")))


def test_the_most_that_a_header_may_say_passes(gate):
    fields = HEADER.model_dump(mode="json") | {"weight": 300} | loss(4, 300)
    assert gate.part(Message(Topic.PART, parts=(json.dumps(fields).encode(), b""))).weight == 300


@pytest.mark.parametrize("parts", [(), (b"",), (b"[" * 5000,), (b"\xff\xfe", b""), None])
def test_what_is_no_part_is_refused_in_one_line(gate, parts: tuple[bytes, ...] | None):
    """None: one part fewer than the header says."""
    whole = part(HEADER, torch.zeros(NUM_VALUES))
    with refused("part") as caught:
        gate.part(replace(whole, parts=whole.parts[:2] if parts is None else parts))
    assert str(caught.value).isprintable()


def test_what_is_not_finite_leaves_a_worker_out(gate):
    """NaN parameters are told before the losses that follow from them."""
    for total in (1e300, -1e300):
        header = HEADER.model_copy(update={"losses": (Loss(epoch=0, num_samples=2, total=total),)})
        with pytest.raises(NotFinite, match="loss"):
            gate.part(part(header))
        with pytest.raises(NotFinite, match="parameters"):
            gate.part(part(header.model_copy(update={"is_finite": False})))
    for value in (nan, inf, -inf):
        gradient = torch.zeros(NUM_VALUES)
        gradient[7] = value
        with pytest.raises(LeftOut):
            values(gate, gradient)


def test_an_outer_gradient_out_of_all_proportion_is_refused_and_the_others_are_not(gate):
    usual, huge = torch.full((NUM_VALUES,), 0.1), torch.full((NUM_VALUES,), 3e37)
    assert torch.equal(values(gate, usual, 0), usual)
    with refused("outer gradients"):
        values(gate, huge)
    for worker in (0, 1):
        assert torch.equal(values(gate, usual, worker), usual)
    for count in (0, NUM_VALUES - 1, NUM_VALUES + 1):
        with refused("part"):
            values(gate, torch.zeros(count))


def test_running_means_have_their_size_and_are_finite_and_in_proportion(gate):
    like = [torch.zeros(3), torch.tensor(4)]
    own = [torch.ones(3), torch.tensor(9)]
    found = gate.buffers(part(HEADER, running=bytes(joined(own))), like)
    assert all(map(torch.equal, found, own))
    for spoilt, error in [
        (torch.full((3,), nan), NotFinite),
        (torch.full((3,), 1e30), InvalidInput),
        (torch.ones(4), InvalidInput),
    ]:
        with pytest.raises(error):
            gate.buffers(part(HEADER, running=bytes(joined([spoilt, own[1]]))), like)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_samples": 31, "loss": 1.0, "score": 1.0},
        {"num_samples": 3, "loss": 1e300, "score": 1.0},
        {"num_samples": 3, "loss": None, "score": 1.0},
        {"num_samples": 3, "loss": "much", "score": 1.0},
    ],
)
def test_a_test_that_cannot_be_does_not_count(gate, fields: dict[str, object]):
    with pytest.raises((InvalidInput, LeftOut)):
        gate.tested(Message(Topic.TESTED, parts=(json.dumps(fields).encode(),)))
    good = json.dumps({"num_samples": 30, "loss": 1.0, "score": 1.0}).encode()
    assert gate.tested(Message(Topic.TESTED, parts=(good,))).num_samples == 30


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
        with refused("saved"):
            gate.own_state(Message(Topic.SAVED, parts=parts))


def test_a_trace_is_of_the_worker_that_sends_it_and_of_times_that_can_be(gate):
    span = Span(Kind.FORWARD, 1, "layer", 2, (), 1.0, 2.0)
    honest = Trace(2, [span], {3: 1.0}, {3: 2.0})
    done = b'{"digest": null}'
    assert gate.done(2, Message(Topic.DONE, parts=(done, honest.as_json())))[1] == honest
    for trace in [
        replace(honest, worker=1),
        replace(honest, spans=[span._replace(worker=1)]),
        replace(honest, spans=[span._replace(end_s=0.5)]),
        replace(honest, sent_s={-1: 1.0}),
    ]:
        with refused("trace"):
            gate.done(2, Message(Topic.DONE, parts=(done, trace.as_json())))
    with refused("done"):
        gate.done(2, Message(Topic.DONE, parts=(done,)))
