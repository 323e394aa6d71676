"""The gate of the hub: every request is checked here before any other code sees it.

A request that fails is its worker's fault alone: that worker is refused, and the others go on.
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
_ONCE = (Topic.ACTIVATIONS, Topic.GRADIENTS)  # of a step that is done nobody asks again
_OF_BODIES = (Topic.PARAMETERS, *_ONCE)
_AHEAD = 1  # steps whose parameters a worker fetches before the one before is done


class Gate:
    """Checks requests of the workers of one run, which has `num_steps` and this `layout`.

    `version` is that of the server's parameters now.
    """

    def __init__(
        self, workers: Workers, num_steps: int, layout: str, version: Callable[[], int]
    ) -> None:
        self._workers, self._num_steps = workers, num_steps
        self._layout, self._version = layout, version
        self._newest = 0  # a child hub's version goes back when its parent has begun anew

    def check(self, worker: int, message: Message) -> Topic:
        """Return the topic of a request; InvalidInput unless this worker may make it now."""
        if message.topic not in ASKED:
            raise InvalidInput("topic", f"a message about {message.topic!r}, which no worker sends")
        topic = Topic(message.topic)
        self._newest = max(self._newest, self._version())
        if not 0 <= message.version <= self._newest:
            raise InvalidInput(
                topic,
                f"parameters of version {message.version}",
                hint=f"the server has made {self._newest}",
            )
        if topic is Topic.PROBE:
            return topic  # whose step is a number of bytes
        if not 0 <= message.step <= self._num_steps:
            raise InvalidInput(topic, f"step {message.step} is none of {self._num_steps}")
        reached = self._workers.of(worker).next_step
        is_over = topic in _ONCE and message.step < reached
        if is_over or (topic in _OF_BODIES and message.step > reached + _AHEAD):
            raise InvalidInput(topic, f"step {message.step} of a worker that has reached {reached}")
        return topic

    def check_layout(self, message: Message) -> None:
        """Raise InvalidInput with the first difference if a worker has another run than the hub."""
        there = b"".join(message.parts[:1]).decode(errors="replace")
        if (found := difference(self._layout, there)) is not None:
            raise InvalidInput("run", f"differs from the hub's: {found}")

    def profile(self, message: Message) -> DeviceProfile:
        """Return the profile in a message."""
        found = read_record(_PROFILE, only_part(message), "profile")
        if any(one.link is None for one in (found, *found.below)):
            raise InvalidInput("profile", "link: a worker has one to the hub")
        if any(one.below for one in found.below):
            raise InvalidInput("profile", "below: a child hub of a child hub")
        return found

    def trace(self, worker: int, message: Message, *, is_child: bool) -> Trace:
        """Return the trace of a worker that is done. InvalidInput if it is not."""
        completed = message.step if is_child else self._workers.of(worker).next_step
        if completed < self._num_steps:
            raise InvalidInput("done", f"it has completed {completed} steps of {self._num_steps}")
        found = read_record(_TRACE, _parts(message, 2 if is_child else 1)[0], "trace")
        found.check(worker, self._num_steps, (*TO_HUB, *FROM_HUB))
        return found

    def report(self, message: Message) -> ChildReport | None:
        """Return what a child hub reports when it is done, if it does."""
        _, *rest = _parts(message, 2)
        return read_record(_REPORT, rest[0], "report") if rest else None


def only_part(message: Message) -> memoryview:
    """Return the part of a message; InvalidInput unless there is one."""
    return _parts(message, 1)[0]


def _parts(message: Message, most: int) -> tensor_parts.Parts:
    parts = tensor_parts.parts_of(message)
    if not 1 <= len(parts) <= most:
        raise InvalidInput(message.topic, f"{len(parts)} parts, and not {most}")
    return parts
