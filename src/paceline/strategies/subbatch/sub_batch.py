"""Run a sub-batch through the head, forward and backward, in turns.

fc1 [gather] forward [gather] fc2 forward [loss] fc2 backward [return] ... fc1 backward [return]
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from paceline.codecs.gathering import Pending, Sent, begin_gather, begin_return
from paceline.core.plan import Kind
from paceline.exchange.layer_gradients import CommunicationThread
from paceline.exchange.step import Learning
from paceline.record.recorder import Recorder
from paceline.strategies.subbatch.batch import StepBatch, num_counted
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.layers import DropoutMasks, HeadLayer
from paceline.strategies.subbatch.loss import CrossEntropy, loss_terms
from paceline.strategies.subbatch.plan import LOSS, returned_of, weights_of


@dataclass(frozen=True)
class HeadPasses:
    """What a rank's sub-batches share.

    `update`: updates a layer after each sub-batch; None if layers are updated once a step. `sent`,
    `sent_of_loss`: byte counts.
    """

    head: tuple[HeadLayer, ...]
    config: SubBatch
    learning: Learning
    thread: CommunicationThread
    recorder: Recorder
    sent: Sent
    sent_of_loss: Sent
    update: Callable[[HeadLayer], None] | None


class SubBatchPass:
    """Forward and backward of one sub-batch.

    After all `turns`, `gradients` (N, features) are those of this rank's activations, and `loss` is
    the sub-batch's part of the mean loss.
    """

    def __init__(
        self,
        through: HeadPasses,
        number: int,
        batch: StepBatch,
        masks: DropoutMasks,
        activations: Tensor,
    ) -> None:
        self._through, self._layers = through, through.head
        self._number, self._batch, self._masks = number, batch, masks
        self._rows = batch.rows_of(number)
        self._targets = batch.targets[self._rows]
        self._of_row = 1 / max(1, batch.num_counted)  # of the mean loss
        # Updates per sub-batch use the gradients of the sub-batch's mean loss.
        counted = 0 if through.update is None else num_counted(self._targets)
        self._update = through.update if counted else None
        self._scale = batch.num_counted / counted if counted else 1.0
        self._activations = self.gradients = activations
        self.loss = activations.new_zeros(())

    def turns(self) -> Iterator[None]:
        """Run the sub-batch; a turn ends after starting an exchange."""
        values, last = self._activations, self._layers[-1]
        for place, layer in enumerate(self._layers):
            if layer.is_linear:
                future = self._gather(place, values)
                yield
                values = future.result() if place == 0 else future.result().t()
            with self._computing(Kind.FORWARD, layer.name):
                values = layer.forward(self._number, values, self._rows, self._masks)
                if layer is last:
                    terms = loss_terms(values, self._targets, layer.shard)
        num_ranks = len(self._batch.rows)
        sizes = [len(terms)] * num_ranks
        what, sent = f"logits of layer {last.name!r}", self._through.sent_of_loss
        post = partial(begin_gather, terms, None, sizes=sizes, traffic=sent, what=what)
        future = self._begin(Kind.SEND, LOSS, post)
        yield
        loss = CrossEntropy.of(future.result().view(num_ranks, *terms.shape), self._targets)
        self.loss = loss.losses.sum() * self._of_row
        for place, layer in reversed(list(enumerate(self._layers))):
            with self._computing(Kind.BACKWARD, layer.name):
                if layer is last:
                    values = loss.gradients(values, self._targets, layer.shard, self._of_row)
                values = layer.backward_input(self._number, values, self._scale)
                if self._update is not None and not layer.is_linear:
                    self._update(layer)
            if layer.is_linear:
                # Send input gradients while computing weight gradients.
                future = self._return(place, values)
                with self._computing(Kind.BACKWARD, weights_of(layer.name)):
                    layer.backward_weight(self._number, self._scale)
                    if self._update is not None:
                        self._update(layer)
                yield
                values = future.result() if place == 0 else future.result().t()
        self.gradients = values

    def _computing(self, kind: Kind, part: str) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(self._through.recorder.computing(kind, part, self._number))
        stack.enter_context(self._through.learning.autocast(self._activations.device))
        return stack

    def _gather(self, place: int, values: Tensor) -> Future[Tensor]:
        """Start gathering the inputs of a linear layer: rows of the body, columns of a layer."""
        what, sizes = "activations of the body", self._batch.sizes_of(self._number)
        if place:
            before = self._layers[place - 1]
            what, sizes = f"activations of layer {before.name!r}", before.sharding.sizes
            values = values.t()  # `begin_gather` gathers rows
        codec, sent = self._through.config.activations, self._through.sent
        post = partial(begin_gather, values, codec, sizes=sizes, traffic=sent, what=what)
        return self._begin(Kind.SEND, self._layers[place].name, post)

    def _return(self, place: int, gradients: Tensor) -> Future[Tensor]:
        """Start summing the input gradients of a linear layer, each where its input came from."""
        name, sizes = self._layers[place].name, self._batch.sizes_of(self._number)
        if place:
            gradients, sizes = gradients.t(), self._layers[place - 1].sharding.sizes
        codec, sent = self._through.config.activation_gradients, self._through.sent
        what = f"activation gradients of layer {name!r}"
        post = partial(begin_return, gradients, codec, sizes=sizes, traffic=sent, what=what)
        return self._begin(Kind.REDUCE, returned_of(name), post)

    def _begin(self, kind: Kind, part: str, post: Callable[..., Pending]) -> Future[Tensor]:
        recorder, number, thread = self._through.recorder, self._number, self._through.thread
        return thread.begin(
            lambda: post(group=thread.process_group),
            lambda start_s, end_s: recorder.add_exchange(kind, part, start_s, end_s, number),
        )
