"""Exchange gradients and parameters between a child hub and its parent hub.

    workers --- a step's gradients --->  ChildServer: the sum of `gather` steps
                                            |  gradients: their mean
            <-- parameters of the    ---    v
                last exchange            parent: an optimizer step, then parameters

For the parent, a child hub is a worker that sends the gradients of all layers. Each exchange copies
the root's parameters and version number to the child hub. So at every hub, staleness is a number of
updates at the root.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Annotated

from pydantic import FailFast, Field, NonNegativeInt, TypeAdapter

from paceline.core.errors import InvalidInput, NonFinite
from paceline.core.outcome import Traffic
from paceline.core.plan import Kind
from paceline.core.reading import read_peer_record
from paceline.core.settings import Record
from paceline.core.wire_format import Purpose
from paceline.measure.device_profile import DeviceProfile
from paceline.record.worker_trace import Trace
from paceline.rpc import tensor_parts
from paceline.rpc.client import Client, HubRestarted
from paceline.rpc.frames import Message
from paceline.rpc.value_checks import LARGEST_LOSS
from paceline.rpc.workers import check_reply, retry_after_restart
from paceline.strategies.wheel.protocol import Topic
from paceline.strategies.wheel.server import GradientSum, Losses, ParameterServer
from paceline.strategies.wheel.staleness import MOST_EPOCHS, LossSum

logger = logging.getLogger(__name__)
_MOST_BELOW = 10**6  # largest number of workers of a child hub: that of any run
_Steps = Annotated[tuple[NonNegativeInt, ...], FailFast(), Field(max_length=_MOST_BELOW)]
_Count = Annotated[int, Field(ge=0, lt=2**63)]


class ChildProgress(Record):
    """The progress of a child hub's workers, which the hub sends with their mean gradients.

    `losses`: the sums of losses in the mean, by epoch. `next_steps`: the next step of each worker.
    """

    losses: Annotated[
        list[tuple[NonNegativeInt, LossSum]], FailFast(), Field(max_length=MOST_EPOCHS)
    ]
    next_steps: _Steps

    @classmethod
    def read(cls, data: memoryview, num_steps: int, num_epochs: int) -> "ChildProgress":
        """Decode a child hub's progress; InvalidInput or NonFinite for wrong values."""
        found = read_peer_record(TypeAdapter(cls), data, "progress")
        step, epoch = max(found.next_steps, default=0), max(dict(found.losses), default=0)
        if step > num_steps or epoch >= num_epochs:
            problem = f"must have steps up to {num_steps}, and epochs below {num_epochs}"
            raise InvalidInput("progress", problem)
        for _, loss in found.losses:
            if abs(loss.total) > LARGEST_LOSS * max(1, loss.num_samples):
                raise NonFinite("the training loss of a child hub is too large")
        return found


class ChildReport(Record):
    """The bytes that a child hub and its workers exchanged in a rehearsal, by purpose.

    `num_pushed`: the number of messages with gradients of the first layers.
    """

    nbytes: dict[Purpose, _Count]
    planned_nbytes: dict[Purpose, _Count]
    num_pushed: _Count


def traffic_of(
    counts: Mapping[str, int], server: ParameterServer, planned_nbytes: int
) -> tuple[Traffic, ...]:
    """Return the sent and the planned bytes between two hubs, by topic.

    `counts`: the number of messages by topic. Each has a value for every parameter of `server`, as
    `ParameterServer.vector_in` checks. `planned_nbytes`: the planned bytes of a message.
    """
    nbytes = sum(parameter.nbytes for parameter in server.parameters)
    return tuple(
        Traffic(topic.value, count * nbytes, count * planned_nbytes)
        for topic in (Topic.WHOLE_PARAMETERS, Topic.WHOLE_GRADIENTS)
        if (count := counts.get(topic, 0))
    )


class ChildHubs:
    """Answers child hubs' requests, at their parent hub."""

    def __init__(self, server: ParameterServer, num_steps: int) -> None:
        self._server, self._num_steps = server, num_steps
        self.counts: Counter[str] = Counter()  # numbers of messages, by topic
        self.workers: set[int] = set()  # the numbers of the child hubs
        self.reports: dict[int, ChildReport] = {}  # from child hubs at the end of a rehearsal

    def fetch(self, worker: int, message: Message) -> Message:
        """Return a message with the current parameters of all layers."""
        self.workers.add(worker)
        part = tensor_parts.part_of(tensor_parts.flatten(self._server.parameters).cpu())
        self.counts[Topic.WHOLE_PARAMETERS] += 1
        return Message(Topic.WHOLE_PARAMETERS, message.step, self._server.version, parts=(part,))

    def update(self, worker: int, message: Message) -> Losses:
        """Update all parameters with a child hub's gradients; return the hub's losses by epoch.

        Raises InvalidInput or NonFinite for wrong values.
        """
        gradients, told, buffers = tensor_parts.parts_of(message, 3)
        num_epochs = ceil(self._num_steps / self._server.steps_per_epoch)
        progress = ChildProgress.read(told, self._num_steps, num_epochs)
        losses, values = dict(progress.losses), self._server.vector_in(gradients)
        mean = GradientSum(values, message.version, losses=losses)
        self._server.merge(worker, message.step, mean, progress.next_steps)
        self.counts[Topic.WHOLE_GRADIENTS] += 1
        if worker == self._server.workers.first:
            tensor_parts.load_buffers(self._server.model, buffers)
        return losses


# A parent's reply with all parameters, and a tuple of steps. The tuple is empty unless this hub has
# just joined: then it has the hub's next step and, if known, its workers' next steps.
ParentReply = tuple[Message, tuple[int, ...]]


class ParentHub:
    """Sends requests to the parent hub; `layout`: the run's description, equal at both hubs."""

    def __init__(self, client: Client, layout: str) -> None:
        self._client, self._layout = client, memoryview(layout.encode())
        self.counts: Counter[str] = Counter()  # numbers of messages, by topic

    def begin(self, step: int) -> ParentReply:
        """Join the parent's run after `step` steps; once training begins, return the reply.

        Raises InvalidInput if the parent rejects this hub, and WorkerLost if it does not answer.
        """

        def join() -> ParentReply:
            begun = self._ask(Message(Topic.BEGIN, step, parts=(self._layout,)))
            whole = self._ask(Message(Topic.WHOLE_PARAMETERS, begun.step))
            told = begun.parts[0] if begun.parts else b"[]"
            steps = read_peer_record(TypeAdapter(_Steps), told, "steps")
            return whole, (begun.step, *steps)

        return retry_after_restart(join)

    def exchange(self, gradients: Message) -> ParentReply:
        """Send mean gradients to the parent; return its updated parameters.

        If the parent was restarted, the gradients are lost, and this hub joins again.
        """
        try:
            whole = self._ask(gradients)
        except HubRestarted:
            logger.info("the parent hub was restarted; this hub is at step %d", gradients.step)
            return self.begin(gradients.step)
        self.counts[Topic.WHOLE_GRADIENTS] += 1
        return whole, ()

    def measure(
        self, own: DeviceProfile, below: Sequence[DeviceProfile], whole_nbytes: int
    ) -> None:
        """Measure the link to the parent, and send the parent all measured speeds.

        `own`: the speed of this hub's device. `below`: the speeds of its workers' devices.
        `whole_nbytes`: the bytes of all parameters.
        """

        def exchange(up: int, down: int) -> None:
            self._ask(Message(Topic.PROBE, down, parts=(memoryview(bytes(up)),)))

        # Warm up: page faults make the first large message slower.
        exchange(whole_nbytes, whole_nbytes)
        # Leave out optimizer steps, which only the root takes.
        seconds = tuple(one for one in own.seconds if one[0] is not Kind.STEP)
        found = own.with_link(exchange, whole_nbytes)
        profile = found.model_copy(update={"seconds": seconds, "below": tuple(below)})
        self._ask(Message(Topic.PROFILE, parts=(profile.model_dump_json().encode(),)))

    def finish(self, step: int, report: ChildReport | None) -> None:
        """Tell the parent that all steps are done, and send the report, if any."""
        parts = [Trace().as_json()]
        if report is not None:
            parts.append(report.model_dump_json().encode())
        done = Message(Topic.DONE, step, parts=tuple(parts))
        while True:
            try:
                self._ask(done)
                return
            except HubRestarted:
                self.begin(step)

    def _ask(self, message: Message) -> Message:
        return check_reply(self._client.request(message).result(), "the parent hub: ")
