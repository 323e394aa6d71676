"""A child hub and its parent in one process: sums, waiting workers, restarts."""

import copy
import json
import math
import struct
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import wait
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from halved import CASES, ManualWorker, batches, equal, plain, serve, values
from paceline.core.errors import InvalidInput, NonFinite, StepDiscarded
from paceline.rpc import tensor_parts
from paceline.rpc.client import HubRestarted
from paceline.rpc.frames import Message
from paceline.strategies.wheel.child_server import ChildServer
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.server import ParameterServer
from paceline.strategies.wheel.tree import (
    ChildHubs,
    ChildProgress,
    ChildReport,
    ParentHub,
    ParentReply,
)
from paceline.training.models.halves import cut
from refusals import refused

CASE, CUT, DEADLINE_S = CASES["mlp"], "layers.3", 20.0
EPOCH, STEPS = 4, 40


class Direct:
    """A parent without a connection; `gate` delays its replies."""

    def __init__(self, server: ParameterServer, place: tuple[int, ...]) -> None:
        self.server, self.place = server, place
        self.children, self.counts = ChildHubs(server, STEPS), Counter()
        self.gate = threading.Event()
        self.gate.set()
        self.losses: list[dict] = []
        self.restarts = False

    def _whole(self, place: tuple[int, ...] = ()) -> ParentReply:
        whole = self.children.fetch(0, Message(""))
        return whole, place

    def begin(self, step: int) -> ParentReply:
        self.server.workers.add(0)
        return self._whole(self.place)

    def exchange(self, message: Message) -> ParentReply:
        assert self.gate.wait(DEADLINE_S)
        if self.restarts:
            return self._whole(self.place)
        self.losses.append(self.children.update(0, message))
        return self._whole()


def tree(gather: int, num_workers: int = 2, staleness: int | None = 1, place=(0,)):
    """Return a root, its child, their connection, and the child's workers."""
    root, _ = serve(CASE, CUT)
    model = CASE.model()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)  # replaced by the parent's parameters
    halves, uplink = cut(model, CASE.inputs(), CUT), Direct(root, place)
    config = Wheel(num_workers, staleness=staleness, gather=gather)
    options = {"num_steps": STEPS, "steps_per_epoch": EPOCH}
    child = ChildServer(model, halves, config, uplink, **options)
    child.begin()
    for worker in range(num_workers):
        child.workers.add(worker)
    hands = [ManualWorker(child, copy.deepcopy(halves), worker) for worker in range(num_workers)]
    return root, child, uplink, hands


def land(child: ChildServer) -> bool:
    """Wait for the running exchange, and load its reply."""
    assert not wait([child._exchange], DEADLINE_S).not_done
    return child.poll_parent()


def test_one_update_of_the_parent_has_the_mean_gradient_of_all_its_samples():
    """Workers with 3, 1 and 2 samples equal torch with one batch of six."""
    root, child, uplink, hands = tree(3, num_workers=3)
    inputs, labels = CASE.inputs(6), CASE.labels(6)
    whole = CASE.model()
    loss = torch.nn.functional.cross_entropy(whole(inputs), labels)
    loss.backward()
    plain(whole).step()
    before = values(child.model)
    for hand, part in zip(hands, (slice(3), slice(3, 4), slice(4, 6)), strict=True):
        assert equal(values(child.model), before)  # summing changes no parameter of the child
        weight = (part.stop - (part.start or 0)) * 3 / 6
        version = hand.fetch()
        gradients, _ = hand.forward(0, version, inputs[part], labels[part], weight)
        child.update(hand.worker, 0, version, gradients)
    assert not land(child)
    assert (root.version, child.version) == (1, 1)
    assert equal(values(child.model), values(root.model))
    for own, other in zip(values(root.model), whole.parameters(), strict=True):
        torch.testing.assert_close(own, other.detach())
    ((epoch, loss_sum),) = uplink.losses[0].items()
    assert (epoch, loss_sum.num_samples) == (0, 6)
    assert loss_sum.total / 6 == pytest.approx(float(loss.detach()))
    assert root.workers.of(0).next_step == 1
    assert root.workers.of(0).below == (1, 1, 1)


def test_with_one_worker_every_step_is_the_sequential_one_to_the_last_bit():
    root, child, _, (hand,) = tree(1, num_workers=1, staleness=0)
    alone, (other,) = serve(CASE, CUT)
    for step, batch in enumerate(batches(CASE, 10)):
        assert child.may_begin(0, step)
        hand.step(step, *batch)
        assert not child.may_begin(0, step + 1)  # until the parameters arrive
        land(child)
        other.step(step, *batch)
        assert equal(values(root.model), values(alone.model))
    assert {str(one.updates.staleness["all workers"]) for one in (root, child)} == {"{0: 10}"}
    assert child.updates.by_worker == {"worker0": 10}


def test_workers_continue_during_an_exchange_until_the_next_sum_is_full():
    root, child, uplink, (one, other) = tree(2)
    source = batches(CASE, 9)
    uplink.gate.clear()
    for step in (0, 1):
        for hand in (one, other):
            assert child.may_begin(hand.worker, step)
            hand.step(step, *next(source))
    assert not child.may_begin(0, 2)
    assert not child.poll_parent()  # no reply yet
    uplink.gate.set()
    assert not land(child)  # and the second sum is sent
    assert child.may_begin(0, 2)
    assert not land(child)
    assert root.version == child.version == 2
    # The second sum was computed with parameters that are one update old.
    assert root.updates.staleness["all workers"] == {0: 1, 1: 1}
    assert child.updates.staleness["all workers"] == {0: 4}


def test_an_incomplete_sum_is_sent_to_the_parent_at_the_end():
    root, child, uplink, (one, _) = tree(5)
    uplink.finish = lambda step, report: setattr(root.workers.of(0), "next_step", step)
    for step, batch in enumerate(batches(CASE, 7)):
        one.step(step, *batch)
    assert root.version <= 1
    child.finish()
    assert root.version == 2
    assert [len(losses) for losses in uplink.losses] == [2, 1]  # epochs of four steps
    assert sum(one.num_samples for losses in uplink.losses for one in losses.values()) == 7 * 4
    assert root.workers.of(0).next_step == STEPS


def test_a_child_resumes_at_its_parents_steps():
    for step, below, steps in ((3, (5, 3), [5, 3]), (4, (5, 3), [5, 4]), (2, (), [2, 2])):
        _, child, *_ = tree(2, place=(step, *below))
        assert [child.workers.of(worker).next_step for worker in range(2)] == steps


def test_a_restart_of_the_parent_discards_the_summed_gradients():
    root, child, uplink, (one, other) = tree(2)
    (batch,) = batches(CASE, 1)
    for step in range(2):
        for hand in (one, other):
            hand.step(step, *batch)
        land(child)
    assert child.workers.of(0).next_step == 2
    version, (restarted, _) = one.fetch(), serve(CASE, CUT)
    gradients, _ = one.forward(2, version, *batch)
    other.step(2, *batch)
    uplink.gate.clear()
    child.update(0, 2, version, gradients)
    uplink.server, uplink.children, uplink.restarts = restarted, ChildHubs(restarted, STEPS), True
    uplink.gate.set()
    one.step(3, *batch)
    assert land(child)
    assert child._sum is None
    assert [child.workers.of(worker).next_step for worker in range(2)] == [0, 0]
    assert equal(values(child.model), values(restarted.model))
    assert not equal(values(child.model), values(root.model))
    child.workers.drop(0)
    child.workers.add(0)
    with pytest.raises(StepDiscarded):
        child.update(0, 0, 0, gradients)


def spoilt(parts: Sequence[Any], place: int, part: Any) -> Sequence[Any]:
    return (*parts[:place], part, *parts[place + 1 :])


# Epoch, its number of samples, the sum of their losses.
ROWS = [(0.5, 4, 1), (0, -4, 1), (10**9, 4, 1), (0, 4, math.nan), (0, 4, 1e300), (0, 10**400, 1)]


def progress(epoch: float, num_samples: int, total: float, steps: Sequence[int] = ()) -> bytes:
    losses = [[epoch, {"num_samples": num_samples, "total": total}]]
    return json.dumps({"losses": losses, "next_steps": steps}).encode()


SPOILT = [
    lambda parts: parts[:2],
    lambda parts: spoilt(parts, 0, parts[1]),
    lambda parts: spoilt(parts, 1, parts[1][:-1]),
    *(lambda parts, row=row: spoilt(parts, 1, progress(*row)) for row in ROWS),
    lambda parts: spoilt(parts, 1, progress(STEPS, 4, 1.0)),
    lambda parts: spoilt(parts, 1, progress(0, 4, 1.0, [0] * (10**6 + 1))),
    lambda parts: spoilt(parts, 1, progress(0, 4, 1.0, [STEPS + 1])),
    lambda parts: spoilt(parts, 1, progress(0, 4, 1.0, [-1])),
    lambda parts: spoilt(parts, 0, struct.pack("d", math.nan) + bytes(parts[0])[8:]),
]


def test_what_does_not_fit_is_refused_and_changes_nothing():
    root, child, uplink, (hand, _) = tree(1)
    (batch,) = batches(CASE, 1)
    caught: list[Message] = []
    uplink.exchange = caught.append
    hand.step(0, *batch)
    assert not wait([child._exchange], DEADLINE_S).not_done
    (sent,) = caught
    before = values(root.model)
    for spoil in SPOILT:
        wrong = Message(sent.topic, sent.step, sent.version, parts=spoil(sent.parts))
        with pytest.raises((InvalidInput, NonFinite)):
            uplink.children.update(0, wrong)
    assert equal(values(root.model), before)
    assert root.version == 0


def below(child: ChildServer, uplink: Direct, *rows: list[list[Any]]) -> None:
    """Let worker 1, a child hub of `child`, send mean gradients of zero with losses by epoch."""
    uplink.children = ChildHubs(uplink.server, 10**6)
    mean = tensor_parts.part_of(torch.zeros_like(tensor_parts.flatten(child.parameters)))
    for losses in rows:
        told = json.dumps({"losses": losses, "next_steps": [1]}).encode()
        parts = (mean, told, tensor_parts.buffers_of(child.model))
        ChildHubs(child, 10**6).update(1, Message("", 1, child.version, parts=parts))


def test_losses_of_too_many_epochs_are_refused_before_they_are_in_the_sum():
    root, child, uplink, (hand, _) = tree(2)
    rows = [[epoch, {"num_samples": 4, "total": 1.0}] for epoch in range(20_000)]
    below(child, uplink, rows[:10_000])
    child.workers.of(1).next_step = 0
    with refused("losses"):
        below(child, uplink, rows[10_000:])
    assert child.workers.of(1).next_step == 0
    hand.step(0, *next(batches(CASE, 1)))
    land(child)
    assert root.version == 1


@pytest.mark.parametrize(("num_samples", "total"), [(2**53 - 1, -1e27), (0, 1e12)])
def test_a_liars_losses_end_neither_a_child_hub_nor_another_worker(num_samples: int, total: float):
    root, child, uplink, (hand, _) = tree(3)
    row = [1, {"num_samples": num_samples, "total": total}]
    below(child, uplink, [row], [row])
    hand.step(0, *next(batches(CASE, 1)))
    land(child)
    assert root.version == 1


def test_a_child_hub_may_have_as_many_workers_as_a_run_with_many():
    told = progress(0, 4, 1.0, [1] * 10**6)
    assert len(ChildProgress.read(memoryview(told), STEPS, EPOCH).next_steps) == 10**6


def test_a_report_has_numbers_of_64_bits_and_a_parents_steps_are_checked():
    told = b'{"nbytes": {}, "planned_nbytes": {}, "num_pushed": %d}'
    assert ChildReport.model_validate_json(told % (2**63 - 1)).num_pushed == 2**63 - 1
    with pytest.raises(ValidationError):
        ChildReport.model_validate_json(told % 10**400)
    client = Mock()
    for steps in (b"[-1]", b'["a"]', b"3"):
        reply = Message("begin", parts=(memoryview(steps),))
        client.request().result.side_effect = [HubRestarted("anew"), reply, reply]
        with refused("steps"):
            ParentHub(client, "{}").begin(0)


CHILD = ("hub", "--parent", "tcp://127.0.0.1:1", "--listen", "tcp://127.0.0.1:0")
REHEARSE = ("rehearse", "lenet5", "--strategy", "wheel", "--device", "p100", "--workers", "4")
IN_TREE = ("--steps", "6", "--strategy-option", "child_hubs=2")


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("epochs", [*CHILD, "--epochs", "3"]),
        ("keep_checkpoints", [*CHILD, "--strategy-option", "keep_checkpoints=3"]),
        ("model", ["hub", "lenet5", *CHILD[1:]]),
        ("options", [*CHILD, "--strategy-option", "head=fc1"]),
        ("listen", [*CHILD[:3]]),
        ("parent", ["hub", "--parent", "tcp://127.0.0.1:1?wroker=1", *CHILD[3:]]),
        ("parent", ["hub", "--parent", "tcp://127.0.0.1:1?worker", *CHILD[3:]]),
        ("steps", [*REHEARSE, *IN_TREE, "--strategy-option", "gather=20"]),
        (
            "child_hubs",
            ["train", "lenet5", "--strategy", "wheel", "--strategy-option", "child_hubs=2"],
        ),
    ],
)
def test_what_a_tree_cannot_do_is_refused(line, field: str, arguments: list[str]):
    assert line(*arguments).refused == field


def test_an_absent_parent_is_named_after_the_timeout(line):
    line(*CHILD, "--timeout", "0.2")
    assert (line.code, CHILD[2] in line.err.splitlines()[-1]) == (1, True)
