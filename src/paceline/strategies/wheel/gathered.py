"""What hubs of a tree tell each other: gradients of some steps together, and what crossed.

child hub   -- whole-gradients: the mean over some steps, of body and head -->  parent hub
            <------------------- whole-parameters: as they are by then -------
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor

from paceline.core.errors import InvalidInput, NonFinite
from paceline.strategies.wheel.coding import Parts, buffer_of, parts_of, values_of
from paceline.strategies.wheel.flat import all_finite
from paceline.strategies.wheel.job import Topic
from paceline.strategies.wheel.tally import Learnt
from paceline.wire.frames import Buffer
from paceline.wire.messages import Message

_NUM_PARTS = 6  # gradients of body and head, what was learnt, progress, buffers of body and head
_LEARNT = 3  # an epoch, its samples, the sum of their losses
_NUMBER_NBYTES = 8


class Between(StrEnum):
    """What two hubs exchange; all of it travels, and none of it is among the seven purposes."""

    BODY_PARAMETERS = "hubs-body-parameters"
    HEAD_PARAMETERS = "hubs-head-parameters"
    BODY_GRADIENTS = "hubs-body-gradients"
    HEAD_GRADIENTS = "hubs-head-gradients"


PARAMETERS = (Between.BODY_PARAMETERS, Between.HEAD_PARAMETERS)
GRADIENTS = (Between.BODY_GRADIENTS, Between.HEAD_GRADIENTS)


class Crossed:
    """How often each purpose crossed between hubs, and with how many bytes."""

    def __init__(self) -> None:
        self.times: Counter[Between] = Counter()
        self.nbytes: Counter[Between] = Counter()

    def note(self, purposes: Sequence[Between], parts: Sequence[Buffer]) -> None:
        """Count a message's parts, one of each purpose."""
        for purpose, part in zip(purposes, parts, strict=True):
            self.times[purpose] += 1
            self.nbytes[purpose] += memoryview(part).nbytes

    def beside_formula(self, body_nbytes: int, head_nbytes: int) -> dict[str, tuple[int, int]]:
        """Return the bytes of each purpose, as counted and of so many messages by the model."""
        whole = dict(zip(Between, 2 * (body_nbytes, head_nbytes), strict=True))
        return {
            purpose.value: (self.nbytes[purpose], self.times[purpose] * whole[purpose])
            for purpose in Between
            if self.times[purpose]
        }


@dataclass
class Gathered:
    """Gradients of `count` steps, summed: those of the body and of the head, as vectors.

    Each comes weighted by its samples: a step of as many as all have on average weighs 1. `version`
    is that of the oldest parameters they were computed with, `learnt` what they learnt, by epoch.
    """

    body: Tensor
    head: Tensor
    version: int
    count: int = 1
    learnt: dict[int, Learnt] = field(default_factory=dict)

    def add(self, body: Tensor, head: Tensor, version: int) -> None:
        """Add the gradients of another step."""
        self.body.add_(body)
        self.head.add_(head)
        self.version = min(self.version, version)
        self.count += 1

    def note(self, learnt: Mapping[int, Learnt]) -> None:
        """Add what was learnt, by epoch."""
        for epoch, (samples, loss) in learnt.items():
            before = self.learnt.get(epoch, Learnt(0, 0.0))
            self.learnt[epoch] = Learnt(before.num_samples + samples, before.loss + loss)

    def message(self, step: int, progress: Sequence[int], buffers: Parts) -> Message:
        """Return the mean of all as it travels to the parent.

        All workers have done `step` steps; `progress` is the next step of each, `buffers` are those
        of body and head.
        """
        learnt = [[epoch, *values] for epoch, values in self.learnt.items()]
        parts = (
            buffer_of((self.body / self.count).cpu()),
            buffer_of((self.head / self.count).cpu()),
            buffer_of(torch.tensor(learnt, dtype=torch.float64)),
            numbers_part(progress),
            *buffers,
        )
        return Message(Topic.WHOLE_GRADIENTS.value, step, self.version, parts=parts)


@dataclass(frozen=True)
class Arrived:
    """What came of a child hub: its gradients, the next step of each of its workers, buffers."""

    gathered: Gathered
    progress: tuple[int, ...]
    buffers: Parts

    @classmethod
    def of(cls, message: Message, body: Tensor, head: Tensor) -> "Arrived":
        """Return what a message says, with vectors like `body` and `head`.

        InvalidInput if it does not fit, NonFinite if a loss is not finite.
        """
        parts = parts_of(message)
        if len(parts) != _NUM_PARTS:
            raise InvalidInput(f"{message.topic}: {len(parts)} parts, and not {_NUM_PARTS}")
        in_body, in_head = (
            values_of(part, like.dtype, like.numel()).to(like.device)
            for part, like in zip(parts, (body, head), strict=False)
        )
        gathered = Gathered(in_body, in_head, message.version, learnt=_learnt(parts[2]))
        return cls(gathered, numbers_of(parts[3]), parts[4:])


def numbers_part(numbers: Iterable[int]) -> memoryview:
    """Return whole numbers as a part of a message."""
    return buffer_of(torch.tensor(list(numbers), dtype=torch.int64))


def numbers_of(part: memoryview) -> tuple[int, ...]:
    """Return the whole numbers in a part; InvalidInput if there are none."""
    return tuple(values_of(part, torch.int64, part.nbytes // _NUMBER_NBYTES).tolist())


def _learnt(part: memoryview) -> dict[int, Learnt]:
    rows = values_of(part, torch.float64, part.nbytes // (_LEARNT * _NUMBER_NBYTES) * _LEARNT)
    if not all_finite([rows]):
        raise NonFinite("the training loss of a child hub is NaN or infinite")
    found = rows.view(-1, _LEARNT).tolist()
    return {int(epoch): Learnt(int(samples), loss) for epoch, samples, loss in found}
