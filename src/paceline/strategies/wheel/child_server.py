"""The parameter server of a child hub, which sums gradients for its parent hub."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import InvalidInput
from paceline.rpc import tensor_parts
from paceline.rpc.frames import Message
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.protocol import Topic
from paceline.strategies.wheel.server import GradientSum, Losses, ParameterServer
from paceline.strategies.wheel.staleness import MOST_EPOCHS
from paceline.strategies.wheel.tree import ChildProgress, ChildReport, ParentHub, ParentReply
from paceline.training.models.halves import Halves, trainable


class ChildServer(ParameterServer):
    """A parameter server whose parent takes the optimizer steps.

    This server sums its workers' gradients, and sends the mean of `config.gathered` updates to the
    parent. At most one exchange with the parent runs at a time. With `staleness=0`, workers wait
    for the parent's reply; otherwise workers continue until the next sum is complete.
    `num_steps`: the number of steps of each worker. `wake`: a function that another thread calls
    when the parent's reply has arrived, so that `poll_parent` can load the reply.
    """

    def __init__(
        self,
        model: nn.Module,
        halves: Halves,
        config: Wheel,
        parent: ParentHub,
        *,
        num_steps: int,
        **options: Any,
    ) -> None:
        unused = torch.optim.SGD(trainable(model), lr=0.0)  # the root takes the optimizer steps
        super().__init__(model, halves, unused, config, **options)
        self.parent, self._gather = parent, config.gathered
        self._num_steps, self._waits = num_steps, config.staleness == 0
        self._sum: GradientSum | None = None
        self._exchange: Future[ParentReply] | None = None
        # Exchange in another thread, so that the hub answers its workers while the parent computes.
        self._executor = ThreadPoolExecutor(1, "paceline-parent")
        self.wake: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Join the parent's run, wait until training begins, and load the parent's parameters."""
        self._take(self.parent.begin(self.workers.completed))

    def poll_parent(self) -> bool:
        """Load a reply of the parent, if one has arrived; return whether the parent restarted."""
        if self._exchange is None or not self._exchange.done():
            return False
        reply, self._exchange = self._exchange.result(), None
        self._take(reply)
        self._send(self._gather)
        _, resume = reply
        return bool(resume)

    def finish(self, report: ChildReport | None = None) -> None:
        """Send the remaining gradients and the report to the parent, after the last step."""
        self._wait_for_reply()
        self._send(1)
        self._wait_for_reply()
        self.parent.finish(self._num_steps, report)

    def close(self) -> None:
        """Shut down; a running exchange ends when the connection to the parent is closed."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def may_begin(self, worker: int, step: int) -> bool:
        """Return whether a worker may begin `step`, or must wait for others or the parent."""
        may = super().may_begin(worker, step)
        is_full = self._sum is not None and self._sum.count >= self._gather
        return may and not (self._exchange is not None and (self._waits or is_full))

    def update(self, worker: int, step: int, version: int, gradients: Tensor) -> Losses:
        """Add the gradients of a step to the sum; return its loss by epoch."""
        losses = super().update(worker, step, version, gradients)
        self._send(self._gather)
        return losses

    def merge(self, worker: int, step: int, mean: GradientSum, below: tuple[int, ...]) -> None:
        """Add a child hub's mean gradients to this hub's sum, as one update."""
        super().merge(worker, step, mean, below)
        self._send(self._gather)

    def _apply(self, version: int, gradients: list[Tensor], losses: Losses) -> None:
        """Add gradients for parameters of `version` to the sum; do not update the parameters.

        Raises InvalidInput if the sum would have losses of more epochs than the parent accepts.
        """
        if self._sum is not None and len(self._sum.losses.keys() | losses.keys()) > MOST_EPOCHS:
            raise InvalidInput("losses", f"must belong to at most {MOST_EPOCHS:,} epochs in a mean")
        vector = tensor_parts.flatten(gradients)
        if self._sum is None:
            self._sum = GradientSum(vector, version)
        else:
            self._sum.vector.add_(vector)
            self._sum.version = min(self._sum.version, version)
            self._sum.count += 1
        for epoch, loss in losses.items():
            self._sum.losses[epoch] += loss
        self._staleness[self.version - version] += 1

    def _send(self, least: int) -> None:
        """Send the mean if no exchange runs and at least `least` updates are summed."""
        gradients = self._sum
        if self._exchange is not None or gradients is None or gradients.count < least:
            return
        self._sum = None
        progress = ChildProgress(
            losses=list(gradients.losses.items()), next_steps=tuple(self.workers.next_steps)
        )
        parts = (
            tensor_parts.part_of((gradients.vector / gradients.count).cpu()),
            progress.model_dump_json().encode(),
            tensor_parts.buffers_of(self.model),
        )
        place = self.workers.completed, gradients.version
        message = Message(Topic.WHOLE_GRADIENTS, *place, parts=parts)
        self._exchange = self._executor.submit(self.parent.exchange, message)
        self._exchange.add_done_callback(lambda _: self.wake())

    def _wait_for_reply(self) -> None:
        # Loop, because `poll_parent` may start the next exchange after it has loaded a reply.
        while self._exchange is not None:
            self._exchange.exception()
            self.poll_parent()

    def _take(self, reply: ParentReply) -> None:
        whole, resume = reply
        (part,) = tensor_parts.parts_of(whole, 1)
        self.parent.counts[Topic.WHOLE_PARAMETERS] += 1
        tensor_parts.load_vector(self.parameters, self.vector_in(part))
        self.version = whole.version
        if not resume:
            return
        self._sum = None  # this hub has joined the parent (again), so its workers repeat steps
        step, *progress = resume
        workers = self.workers.all
        known = progress if len(progress) == len(workers) else [step] * len(workers)
        for worker, own in zip(workers, known, strict=True):
            if worker.next_step < self._num_steps:  # workers that are done repeat no step
                worker.next_step = max(own, step)
