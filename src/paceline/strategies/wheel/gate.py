"""Check every request of a worker, before the hub executes it.

If a request is invalid, the hub drops the worker that sent it; the other workers continue.
"""

from collections.abc import Callable

from pydantic import TypeAdapter

from paceline.core.errors import InvalidInput
from paceline.core.reading import read_record
from paceline.measure.device_profile import DeviceProfile
from paceline.record.worker_trace import Trace
from paceline.rpc import tensor_parts
from paceline.rpc.frames import Message
from paceline.rpc.workers import difference
from paceline.strategies.wheel.protocol import ASKED, Topic
from paceline.strategies.wheel.split import FROM_HUB, TO_HUB
from paceline.strategies.wheel.staleness import Workers
from paceline.strategies.wheel.tree import ChildReport

_TRACE, _PROFILE = TypeAdapter(Trace), TypeAdapter(DeviceProfile)
_REPORT = TypeAdapter(ChildReport)
_ONCE = (Topic.ACTIVATIONS, Topic.GRADIENTS)  # topics that are refused for completed steps
_OF_BODIES = (Topic.PARAMETERS, *_ONCE)
_AHEAD = 1  # how many steps early a worker may fetch parameters


class Gate:
    """Checks the requests of a run's workers; `version` returns the server's current version."""

    def __init__(
        self, workers: Workers, num_steps: int, layout: str, version: Callable[[], int]
    ) -> None:
        self._workers, self._num_steps = workers, num_steps
        self._layout, self._version = layout, version
        self._newest = 0  # highest version so far; a parent's restart may lower the version

    def check(self, worker: int, message: Message) -> Topic:
        """Return the topic of a request; InvalidInput if the worker must not send it now."""
        if message.topic not in ASKED:
            raise InvalidInput("topic", "is not a request of workers", got=message.topic)
        topic = Topic(message.topic)
        self._newest = max(self._newest, self._version())
        if not 0 <= message.version <= self._newest:
            problem = f"version must be from 0 to {self._newest}"
            raise InvalidInput(topic, problem, got=message.version)
        if topic is Topic.PROBE:
            return topic  # the field `step` of a PROBE is a number of bytes
        if not 0 <= message.step <= self._num_steps:
            raise InvalidInput(topic, f"step must be from 0 to {self._num_steps}", got=message.step)
        reached = self._workers.of(worker).next_step
        is_over = topic in _ONCE and message.step < reached
        if is_over or (topic in _OF_BODIES and message.step > reached + _AHEAD):
            problem = f"step must be {reached} or {reached + _AHEAD}"
            raise InvalidInput(topic, problem, got=message.step)
        return topic

    def check_layout(self, message: Message) -> None:
        """Raise InvalidInput if a worker's description of the run differs from the hub's."""
        there = b"".join(message.parts[:1]).decode(errors="replace")
        if (found := difference(self._layout, there)) is not None:
            raise InvalidInput("run", f"differs from the hub's: {found}")

    def profile(self, message: Message) -> DeviceProfile:
        """Return the device profile in a message; raise InvalidInput if it is invalid."""
        found = read_record(_PROFILE, only_part(message), "profile")
        if any(one.link is None for one in (found, *found.below)):
            raise InvalidInput("profile", "must have the measured link to the hub")
        if any(one.below for one in found.below):
            raise InvalidInput("profile", "cannot have a child hub below a child hub")
        return found

    def trace(self, worker: int, message: Message, *, is_child: bool) -> Trace:
        """Return the trace in a worker's DONE; InvalidInput if the worker is not done."""
        completed = message.step if is_child else self._workers.of(worker).next_step
        if completed < self._num_steps:
            raise InvalidInput("done", f"requires all {self._num_steps} steps", got=completed)
        found = read_record(_TRACE, _parts(message, 2 if is_child else 1)[0], "trace")
        found.check(worker, self._num_steps, (*TO_HUB, *FROM_HUB))
        return found

    def report(self, message: Message) -> ChildReport | None:
        """Return the report in a child hub's DONE; None if the message has no report."""
        _, *rest = _parts(message, 2)
        return read_record(_REPORT, rest[0], "report") if rest else None


def only_part(message: Message) -> memoryview:
    """Return the only part of a message; raise InvalidInput unless there is one part."""
    return _parts(message, 1)[0]


def _parts(message: Message, most: int) -> tensor_parts.Parts:
    parts = tensor_parts.parts_of(message)
    if not 1 <= len(parts) <= most:
        raise InvalidInput(message.topic, f"must have 1 to {most} parts", got=len(parts))
    return parts
