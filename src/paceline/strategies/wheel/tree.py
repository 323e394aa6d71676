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
from collections.abc import Sequence

import torch
from pydantic import NonNegativeInt

from paceline.core.errors import InvalidInput, NonFinite
from paceline.core.outcome import Traffic
from paceline.core.plan import Kind
from paceline.core.settings import Record
from paceline.core.wire_format import Purpose
from paceline.measure.device_profile import DeviceProfile
from paceline.record.worker_trace import Trace
from paceline.rpc import tensor_parts, value_checks
from paceline.rpc.client import Client, HubRestarted
from paceline.rpc.frames import Message
from paceline.rpc.value_checks import LARGEST_LOSS
from paceline.rpc.workers import check_reply, retry_after_restart
from paceline.strategies.wheel.protocol import Topic
from paceline.strategies.wheel.server import GradientSum, ParameterServer
from paceline.strategies.wheel.staleness import LossSum

logger = logging.getLogger(__name__)
_MOST_BELOW = 1000  # largest number of workers of a child hub
_LOSS_FIELDS = 3  # numbers sent for an epoch: the epoch, its samples, the sum of their losses


class ChildReport(Record):
    """The bytes that a child hub and its workers exchanged in a rehearsal, by purpose.

    `num_pushed`: the number of messages with gradients of the first layers.
    """

    nbytes: dict[Purpose, NonNegativeInt]
    planned_nbytes: dict[Purpose, NonNegativeInt]
    num_pushed: NonNegativeInt


class HubTraffic:
    """Counts the messages and bytes between two hubs, by topic."""

    def __init__(self) -> None:
        self.times: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()

    def add(self, message: Message) -> None:
        """Count a message, and the bytes of its first part, which has values of all layers."""
        self.times[message.topic] += 1
        self.nbytes[message.topic] += memoryview(message.parts[0]).nbytes

    def rows(self, whole_nbytes: int) -> tuple[Traffic, ...]:
        """Return sent and planned bytes by topic; `whole_nbytes`: the bytes of all parameters."""
        return tuple(
            Traffic(topic.value, self.nbytes[topic], times * whole_nbytes)
            for topic in (Topic.WHOLE_PARAMETERS, Topic.WHOLE_GRADIENTS)
            if (times := self.times[topic])
        )


class ChildHubs:
    """Answers child hubs' requests, at their parent hub."""

    def __init__(self, server: ParameterServer, num_steps: int) -> None:
        self._server, self._num_steps = server, num_steps
        self.traffic = HubTraffic()
        self.workers: set[int] = set()  # the numbers of the child hubs
        self.reports: dict[int, ChildReport] = {}  # from child hubs at the end of a rehearsal

    def fetch(self, worker: int, message: Message) -> Message:
        """Return a message with the current parameters of all layers."""
        self.workers.add(worker)
        part = tensor_parts.part_of(tensor_parts.flatten(self._server.parameters).cpu())
        version = self._server.version
        reply = Message(Topic.WHOLE_PARAMETERS, message.step, version, parts=(part,))
        self.traffic.add(reply)
        return reply

    def update(self, worker: int, message: Message) -> dict[int, LossSum]:
        """Update all parameters with a child hub's gradients; return the hub's losses by epoch.

        Raises InvalidInput or NonFinite for wrong values.
        """
        gradients, losses, progress, buffers = tensor_parts.parts_of(message, 4)
        mean = GradientSum(self._server.vector_in(gradients), message.version)
        mean.losses.update(self._losses_in(losses))
        below = tensor_parts.numbers_of(progress)
        if len(below) > _MOST_BELOW:
            problem = f"must be at most {_MOST_BELOW} numbers, one per worker"
            raise InvalidInput("steps", problem, got=len(below))
        if any(not 0 <= step <= self._num_steps for step in below):
            raise InvalidInput("steps", f"must be from 0 to {self._num_steps}", got=max(below))
        self._server.merge(worker, message.step, mean, below)
        self.traffic.add(message)
        if worker == self._server.workers.first:
            tensor_parts.load_buffers(self._server.model, buffers)
        return mean.losses

    def _losses_in(self, part: memoryview) -> dict[int, LossSum]:
        """Decode a child hub's losses by epoch; InvalidInput or NonFinite for wrong values."""
        num_rows = part.nbytes // (_LOSS_FIELDS * torch.float64.itemsize)
        rows = tensor_parts.values_of(part, torch.float64, num_rows * _LOSS_FIELDS)
        if not value_checks.all_finite([rows]):
            raise NonFinite("the training loss of a child hub is NaN or infinite")
        found: dict[int, LossSum] = {}
        for epoch, num_samples, total in rows.view(-1, _LOSS_FIELDS).tolist():
            is_whole = epoch == int(epoch) and num_samples == int(num_samples)
            if not is_whole or not 0 <= epoch < self._num_steps or num_samples < 0:
                problem = f"must have valid epochs and sample counts, not {epoch} and {num_samples}"
                raise InvalidInput("losses", problem)
            if abs(total) > LARGEST_LOSS * max(1, num_samples):
                raise NonFinite("the training loss of a child hub is too large")
            found[int(epoch)] = LossSum(int(num_samples), total)
        return found


# A parent's reply with all parameters, and a tuple of steps. The tuple is empty unless this hub has
# just joined: then it has the hub's next step and, if known, its workers' next steps.
ParentReply = tuple[Message, tuple[int, ...]]


class ParentHub:
    """Sends requests to the parent hub; `layout`: the run's description, equal at both hubs."""

    def __init__(self, client: Client, layout: str) -> None:
        self._client, self._layout = client, memoryview(layout.encode())
        self.traffic = HubTraffic()

    def begin(self, step: int) -> ParentReply:
        """Join the parent's run after `step` steps; once training begins, return the reply.

        Raises InvalidInput if the parent rejects this hub, and WorkerLost if it does not answer.
        """

        def join() -> ParentReply:
            begun = self._ask(Message(Topic.BEGIN, step, parts=(self._layout,)))
            whole = self._ask(Message(Topic.WHOLE_PARAMETERS, begun.step))
            parts = tensor_parts.parts_of(begun)
            return whole, (begun.step, *(tensor_parts.numbers_of(parts[0]) if parts else ()))

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
        self.traffic.add(gradients)
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
        told = memoryview(profile.model_dump_json().encode())
        self._ask(Message(Topic.PROFILE, parts=(told,)))

    def finish(self, step: int, report: ChildReport | None) -> None:
        """Tell the parent that all steps are done, and send the report, if any."""
        parts = [memoryview(Trace().as_json())]
        if report is not None:
            parts.append(memoryview(report.model_dump_json().encode()))
        done = Message(Topic.DONE, step, parts=tuple(parts))
        while True:
            try:
                self._ask(done)
                return
            except HubRestarted:
                self.begin(step)

    def _ask(self, message: Message) -> Message:
        return check_reply(self._client.request(message).result(), "the parent hub: ")
