"""A hub that is the child of another: it gathers gradients, and its parent takes the steps.

    workers --- a step's gradients --->  Branch: the sum of `gather` steps
                                            |  whole-gradients: their mean
            <-- parameters, as they  ---    v
                came the last time       parent: an optimizer step; its parameters come back

Its parameters are a copy of its parent's, and change only when those have come. Its version is the
version of that copy at the root, so that a staleness counts the root's updates at every hub.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.core.errors import InvalidInput
from paceline.strategies.wheel.coding import Parts, parts_of, values_of
from paceline.strategies.wheel.flat import flatten, load
from paceline.strategies.wheel.gathered import (
    GRADIENTS,
    PARAMETERS,
    Crossed,
    Gathered,
    numbers_of,
)
from paceline.strategies.wheel.half import buffers_of
from paceline.strategies.wheel.halves import Halves, trainable
from paceline.strategies.wheel.job import Job, Topic
from paceline.strategies.wheel.lanes import GivenUp, Refused
from paceline.strategies.wheel.server import ParameterServer
from paceline.strategies.wheel.tally import Learnt
from paceline.strategies.wheel.trace import Record, packed
from paceline.wire.client import Client
from paceline.wire.messages import Message
from paceline.wire.outbox import HubRestarted


class Parent(NamedTuple):
    """A child hub's parent: the connection to it, its run, and how many steps go there together."""

    client: Client
    job: Job
    gather: int


class Place(NamedTuple):
    """Where a child hub goes on: at a step, and each worker at its own if those are known."""

    step: int
    progress: tuple[int, ...]


class Renewal(NamedTuple):
    """A version of all parameters; and where to go on, if the parent has begun anew."""

    version: int
    parts: Parts
    place: Place | None = None


class Uplink:
    """Talks to the parent, over connections that may break. `layout` is what both must share."""

    def __init__(self, client: Client, layout: str, say: Callable[[str], None]) -> None:
        self._client, self._layout, self._say = client, memoryview(layout.encode()), say
        self.crossed = Crossed()

    def begin(self, step: int) -> Renewal:
        """Take part, as one that has done so many steps, as soon as the parent begins.

        Raises InvalidInput if the parent refuses this hub, WorkerLost if it is away for too long.
        """
        while True:
            try:
                begun = self._ask(Message(Topic.BEGIN.value, step, parts=(self._layout,)))
                whole = self._ask(Message(Topic.WHOLE_PARAMETERS.value, begun.step))
            except (HubRestarted, GivenUp):
                self._say(f"the parent hub has begun anew, at step {step} of this one")
                continue
            progress = numbers_of(parts_of(begun)[0]) if begun.parts else ()
            return self._renewal(whole, Place(begun.step, progress))

    def exchange(self, gradients: Message) -> Renewal:
        """Have the parent take a step. What was sent is void if it has begun anew meanwhile."""
        try:
            whole = self._ask(gradients)
        except (HubRestarted, GivenUp):
            self._say(f"the parent hub has begun anew, at step {gradients.step} of this one")
            return self.begin(gradients.step)
        self.crossed.note(GRADIENTS, gradients.parts[: len(GRADIENTS)])
        return self._renewal(whole)

    def finish(self, step: int) -> None:
        """Tell the parent that all steps are done."""
        done = Message(Topic.DONE.value, step, parts=(memoryview(packed(Record())),))
        while True:
            try:
                self._ask(done)
            except (HubRestarted, GivenUp):
                self.begin(step)
                continue
            return

    def _ask(self, message: Message) -> Message:
        reply = self._client.request(message).result()
        if reply.topic == Topic.AGAIN:
            raise GivenUp
        if reply.topic == Topic.REFUSED:
            raise Refused(f"the parent hub: {bytes(reply.parts[0]).decode(errors='replace')}")
        return reply

    def _renewal(self, whole: Message, place: Place | None = None) -> Renewal:
        parts = parts_of(whole)
        if len(parts) != len(PARAMETERS):
            raise InvalidInput(f"the parent hub: {whole.topic}: {len(parts)} parts")
        self.crossed.note(PARAMETERS, parts)
        return Renewal(whole.version, parts, place)


class Branch(ParameterServer):
    """A parameter server whose steps are taken by a parent.

    `gather` updates of its workers make one of the parent's; one of them is on its way at a time.
    With a `staleness` of 0 workers wait for what comes back; otherwise they go on meanwhile, until
    as many updates are gathered again. A worker has `num_steps` steps to do, of which an epoch has
    `steps_per_epoch`. `wake` is called, by another thread, when there is something to `renew`.
    """

    def __init__(
        self,
        model: nn.Module,
        halves: Halves,
        uplink: Uplink,
        *,
        num_workers: int,
        staleness: int | None,
        gather: int,
        num_steps: int,
        steps_per_epoch: int,
    ) -> None:
        if gather < 1:
            raise InvalidInput(f"gather: {gather} steps; there must be at least 1")
        unused = torch.optim.SGD(trainable(model), lr=0.0)  # the root's optimizer takes the steps
        super().__init__(model, halves, unused, num_workers=num_workers, staleness=staleness)
        self._uplink, self._gather = uplink, gather
        self._num_steps, self._steps_per_epoch = num_steps, steps_per_epoch
        self._waits = staleness == 0
        self._sum: Gathered | None = None
        self._learnt: dict[int, Learnt] = {}  # by worker, of the step that is half done
        self._flight: Future[Renewal] | None = None
        self._executor = ThreadPoolExecutor(1, "paceline-parent")
        self.wake: Callable[[], None] = lambda: None

    @property
    def crossed(self) -> Crossed:
        """What this hub and its parent have exchanged."""
        return self._uplink.crossed

    @property
    def done(self) -> int:
        """The steps that all have done who train, or are at their end."""
        every = self.workers.all
        there = [one.next_step for one in every if one.is_live or one.next_step >= self._num_steps]
        return min(there, default=0)

    def begin(self) -> None:
        """Get the parameters, as soon as the parent begins. Raises as `Uplink.begin`."""
        self._take(self._uplink.begin(self.done))

    def renew(self) -> bool:
        """Take what has come of the parent, if anything has.

        Returns whether the parent has begun anew: then all workers must begin their steps again,
        and what they had gathered is dropped. Raises as `Uplink.exchange`.
        """
        if self._flight is None or not self._flight.done():
            return False
        renewal, self._flight = self._flight.result(), None
        self._take(renewal)
        self._send_if_full()
        return renewal.place is not None

    def finish(self) -> None:
        """Send what is left, when all workers are done, and tell the parent so."""
        self._land()
        if self._sum is not None:
            self._send(self._sum)
            self._land()
        self._uplink.finish(self._num_steps)

    def close(self) -> None:
        """Wait for nothing any more; what is on its way ends with the connection."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def may_begin(self, worker: int, step: int) -> bool:
        """Return whether the worker may begin a step now; ask again after any update or renewal."""
        may = super().may_begin(worker, step)
        is_full = self._sum is not None and self._sum.count >= self._gather
        return may and not (self._flight is not None and (self._waits or is_full))

    def answer(
        self,
        worker: int,
        step: int,
        version: int,
        activations: Tensor,
        labels: Tensor,
        weight: float,
    ) -> tuple[Tensor, float]:
        """Answer as any server, and keep what was learnt until the step is complete."""
        answered = super().answer(worker, step, version, activations, labels, weight)
        loss = answered[1] / weight * len(labels) if weight else 0.0
        self._learnt[worker] = Learnt(len(labels), loss)
        return answered

    def update(self, worker: int, step: int, version: int, gradients: Tensor) -> int:
        """Gather the gradients of a step; return the version, which stays as it is."""
        before = self.next_step(worker)
        version = super().update(worker, step, version, gradients)
        if self.next_step(worker) > before:
            assert self._sum is not None
            self._sum.note({step // self._steps_per_epoch: self._learnt.pop(worker)})
            self._send_if_full()
        return version

    def merge(self, worker: int, step: int, gathered: Gathered, below: tuple[int, ...]) -> None:
        """Gather what a child hub of this one has gathered: it counts as one update."""
        super().merge(worker, step, gathered, below)
        assert self._sum is not None
        self._sum.note(gathered.learnt)
        self._send_if_full()

    def _apply(self, version: int, body: list[Tensor], head: list[Tensor]) -> None:
        in_body, in_head = flatten(body), flatten(head)
        if self._sum is None:
            self._sum = Gathered(in_body, in_head, version)
        else:
            self._sum.add(in_body, in_head, version)
        self._staleness[self.version - version] += 1

    def _send_if_full(self) -> None:
        if self._flight is None and self._sum is not None and self._sum.count >= self._gather:
            self._send(self._sum)

    def _send(self, gathered: Gathered) -> None:
        self._sum = None
        progress = [one.next_step for one in self.workers.all]
        buffers = tuple(buffers_of(half) for half in (self.halves.body, self.halves.head))
        message = gathered.message(self.done, progress, buffers)
        self._flight = self._executor.submit(self._uplink.exchange, message)
        self._flight.add_done_callback(lambda _: self.wake())

    def _land(self) -> None:
        """Wait for all that is on its way."""
        while self._flight is not None:
            self._flight.exception()
            self.renew()

    def _take(self, renewal: Renewal) -> None:
        for parameters, part in zip((self._body, self._head), renewal.parts, strict=True):
            count = sum(parameter.numel() for parameter in parameters)
            load(parameters, values_of(part, parameters[0].dtype, count))
        self.version = renewal.version
        if renewal.place is None:
            return
        self._sum = None
        step, progress = renewal.place
        workers = self.workers.all
        known = progress if len(progress) == len(workers) else (step,) * len(workers)
        for worker, own in zip(workers, known, strict=True):
            if worker.next_step < self._num_steps:  # who is done does not come back
                worker.next_step = max(own, step)
