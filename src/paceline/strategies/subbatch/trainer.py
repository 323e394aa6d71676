"""The steps and tests of a model whose head is sharded, as the training loop asks for them.

    main      body's forward | fc1/0 fc1/1 | fc2/0 fc2/1 | backward ... | body's backward | update
    thread         [fc1/0][fc1/1]    [fc2/0][fc2/1]  [loss/0] ...

A step's sub-batches go through the head as `plan` draws it. All are under way together, and take
turns: while one waits for an exchange, the next computes. All ranks take the same turns, and so
begin their exchanges in the same order. With updates per sub-batch, a sub-batch is through before
the next begins to compute, whose activations are on their way by then.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.codecs.gathering import Pending, Sent, begin_gather, begin_return
from paceline.core.cost import compute_lane
from paceline.core.errors import NonFinite
from paceline.core.plan import Kind, TaskId
from paceline.core.timeline import Span
from paceline.data.dataset import IndexedSamples
from paceline.exchange.replica import Method, ModelReplica, SingleReplica
from paceline.exchange.step import Share
from paceline.exchange.synchronized import Synchronized
from paceline.links.group import Group
from paceline.record.clock import Clock
from paceline.record.recorder import Recorder
from paceline.strategies.subbatch import layers
from paceline.strategies.subbatch.communication import CommunicationThread, LayerGradients
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.plan import LOSS, returned_of, weights_of

_TEST_BATCH = 256


class HeadRecorder(Recorder):
    """A recorder that records the layers of the head for each sub-batch, too."""

    def __init__(self, clock: Clock, device: str, rank: int) -> None:
        super().__init__(clock, device, rank)
        self._computed: list[tuple[TaskId, Any, Any]] = []  # between two marks of the clock

    def start_trace(self, model: nn.Module) -> None:
        """Record the spans of the following steps of `model`, until `stop_trace`."""
        super().start_trace(model)
        self._computed = []

    @contextmanager
    def computing(self, kind: Kind, part: str, number: int) -> Iterator[None]:
        """Record the computation inside as a part of the sub-batch of that number."""
        if not self.tracing:
            yield
            return
        task, start = TaskId(self._step, kind, part, self._rank, number), self._clock.mark()
        yield
        self._computed.append((task, start, self._clock.mark()))

    def spans(self) -> list[Span]:
        """Return the spans of the traced steps; waits for the device where marks need that."""
        starts = self._clock.seconds([start for _, start, _ in self._computed])
        ends = self._clock.seconds([end for _, _, end in self._computed])
        on = (compute_lane(self._device),)
        own = [
            Span(one.kind, one.step, one.part, one.worker, on, start, end, one.sub_batch)
            for (one, _, _), start, end in zip(self._computed, starts, ends, strict=True)
        ]
        return super().spans() + own


@dataclass(frozen=True)
class SplitModel:
    """A model on one rank: the whole body, and the rank's outputs of the head's layers.

    `module` holds the parameters of both. `batch_size` is the most samples of a rank in a step.
    """

    module: nn.Module
    body: nn.Module
    head: tuple[layers.HeadLayer, ...]
    batch_size: int

    @property
    def num_classes(self) -> int:
        """All outputs of the model."""
        return self.head[-1].sharding.num_outputs

    @property
    def shardings(self) -> dict[str, layers.Sharding]:
        """The sharding of each layer of the head, by its name."""
        return {layer.name: layer.sharding for layer in self.head}


class SplitTrainer:
    """Takes the steps of a rank: the `Learner` of the training loop.

    All ranks make it together. `seed` is that of the dropout masks. `thread` is by default made
    here. `sent`: the bytes that this rank has sent for the head; `sent_of_loss`: for the terms of
    the loss, and the labels. The header of a message, of 40 bytes, counts.
    """

    def __init__(
        self,
        model: SplitModel,
        config: SubBatch,
        group: Group,
        recorder: HeadRecorder,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        learning_rate: float | None = None,
        seed: int = 0,
        *,
        thread: CommunicationThread | None = None,
    ) -> None:
        self.model, self.config, self.group, self.recorder = model, config, group, recorder
        self.thread = thread or CommunicationThread(group)
        self.sent, self.sent_of_loss = Sent(), Sent()
        self._learning_rate, self._seed = learning_rate, seed
        self._gradients: LayerGradients | None = None
        self.replica: ModelReplica = SingleReplica(model.body)
        if group.world_size > 1:
            gradients = self._gradients = LayerGradients(self.thread, group, config.gradients)
            method = Method("subbatch", lambda group, as_views: gradients)
            self.replica = Synchronized(
                model.body, method, group=group, gradient_as_bucket_view=True
            )
        self._step = 0
        self.updates_each = config.updates == "sub-batch"
        self._optimizer = optimizer(model.body if self.updates_each else model.module)
        heads = model.head if self.updates_each else ()
        self._of_layers = {layer.name: optimizer(layer.module) for layer in heads}

    @property
    def sent_nbytes(self) -> dict[str, float]:
        """The bytes that this rank sends in a step, by purpose."""
        sent = {
            "activations": self.sent.activations_sent,
            "activation_gradients": self.sent.activation_gradients_sent,
            "loss": self.sent_of_loss.activations_sent,
            "gradients": self._gradients.bytes_sent if self._gradients else 0,
        }
        return {purpose: nbytes / max(1, self._step) for purpose, nbytes in sent.items()}

    def step(self, source: Iterator[Share]) -> Tensor:
        """Take a step and return the mean loss of the whole batch, a 0-d tensor.

        Raises NonFinite, on all ranks, with the rank and the layer whose values are not finite.
        """
        recorder = self.recorder
        with recorder.phase(Kind.LOAD):
            share, model, group = next(source), self.model, self.thread.process_group
            message = layers.label_message(share.targets, model.batch_size, model.num_classes)
            rows, sent = [1] * self.group.world_size, self.sent_of_loss
            post = partial(begin_gather, message, None, group, rows, traffic=sent, what="labels")
            labels = self.thread.begin(post)
        with recorder.phase(Kind.FORWARD):
            activations = self.replica(share.inputs)
        # One sub-batch for each worker, if it has as many samples.
        num_sub_batches = min(model.batch_size, len(model.head[0].sharding.sizes))
        batch = layers.StepBatch.of(labels.result(), num_sub_batches)
        masks = layers.DropoutMasks(self._seed, self._step, batch.num_samples)
        try:
            gradients, loss = self._run_head(activations, batch, masks)
        except NonFinite as error:
            rate = "" if self._learning_rate is None else f" than {self._learning_rate:g}"
            raise NonFinite(
                f"{error}; if the loss has grown before, choose a smaller learning_rate{rate}"
            ) from error
        with recorder.phase(Kind.BACKWARD):
            # The exchange averages over ranks; these are gradients of the mean over all samples.
            activations.backward(gradients * self.group.world_size)
        with recorder.phase(Kind.STEP):
            self._optimizer.step()
            self._optimizer.zero_grad()
        recorder.end_step()
        self._step += 1
        return loss

    def _run_head(
        self, activations: Tensor, batch: layers.StepBatch, masks: layers.DropoutMasks
    ) -> tuple[Tensor, Tensor]:
        """Run the head forward and backward, and let its parameters' gradients accumulate.

        Returns the gradients of the whole batch's mean loss by `activations`, those of this rank's
        samples, and that loss, a 0-d tensor.
        """
        own = activations.detach().tensor_split(len(batch.rows[0]))
        passes = [_SubBatchPass(self, i, batch, masks, one) for i, one in enumerate(own)]
        turns = [one.turns() for one in passes]
        if self.updates_each:
            next(turns[0])
            for one, following in zip(turns, [*turns[1:], iter(())], strict=True):
                next(following, None)  # its first turn only sends activations
                for _ in one:
                    pass
        else:
            while turns:
                turns = [one for one in turns if next(one, "over") != "over"]
        gradients = torch.cat([one.gradients for one in passes])
        return gradients, torch.stack([one.loss for one in passes]).sum()

    def update(self, layer: layers.HeadLayer) -> None:
        """Update a layer of the head with the gradients of a sub-batch."""
        self._of_layers[layer.name].step()
        self._of_layers[layer.name].zero_grad()

    @torch.no_grad()
    def test(self, samples: IndexedSamples) -> tuple[float, int]:
        """Return the summed loss and the number of right answers on this rank's share of them."""
        # Each rank has running statistics of its own samples: all test the body that rank 0 has.
        self.group.broadcast(self.model.body.buffers())
        self.model.body.eval()
        loss, num_right = 0.0, 0
        ranks = range(self.group.world_size)
        shares = [range(rank, len(samples), len(ranks)) for rank in ranks]
        most = max(1, _TEST_BATCH // len(ranks))
        for first in range(0, len(shares[0]), most):
            found = self._test_batch(samples, [one[first : first + most] for one in shares])
            loss, num_right = loss + found[0], num_right + found[1]
        self.model.body.train()
        return loss, num_right

    def _test_batch(self, samples: IndexedSamples, shares: Sequence[range]) -> tuple[float, int]:
        """Test some samples of each rank, which go through the head together."""
        rank, last = self.group.rank, self.model.head[-1]
        sizes = [len(one) for one in shares]

        def gather(values: Tensor, sizes: Sequence[int]) -> Tensor:
            group = self.thread.process_group
            return begin_gather(values, None, group, sizes, what="a test").wait()

        inputs, targets = samples.__getitems__(shares[rank] or [0])  # no batch is empty
        inputs, targets = inputs.to(self.group.device), targets[: sizes[rank]]
        own = layers.label_message(
            targets.to(self.group.device), max(sizes), self.model.num_classes
        )
        batch = layers.StepBatch.of(gather(own, [1] * len(sizes)), 1)
        values = gather(self.model.body(inputs)[: sizes[rank]], sizes)
        for place, layer in enumerate(self.model.head):
            if layer.is_linear and place:
                before = self.model.head[place - 1].sharding.sizes
                values = gather(values.t(), before).t()
            values = layer.evaluate(values)
        terms = layers.loss_terms(values, batch.targets, last.shard)
        best, places = values.max(1)
        own = torch.cat((terms, torch.stack((best, places + last.shard.first), 1)), 1)
        whole = gather(own, [len(own)] * len(sizes)).view(len(sizes), len(own), -1)
        bests, classes = whole[:, :, -2], whole[:, :, -1]
        losses = layers.CrossEntropy.of(whole[:, :, :-2]).losses
        classes = classes.gather(0, bests.argmax(0, keepdim=True)).squeeze(0).long()
        mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        return float(losses[mine].sum()), int((classes == batch.targets)[mine].sum())

    def close(self) -> None:
        """End the exchange of gradients, and the thread."""
        self.replica.close()
        self.thread.close()


class _SubBatchPass:
    """The forward and backward of one sub-batch.

    At the end of the `turns`, `gradients` are those by the activations of this rank's samples, and
    `loss` is the sub-batch's part of the mean loss.
    """

    def __init__(
        self,
        trainer: SplitTrainer,
        number: int,
        batch: layers.StepBatch,
        masks: layers.DropoutMasks,
        activations: Tensor,
    ) -> None:
        self._trainer, self._layers = trainer, trainer.model.head
        self._number, self._batch, self._masks = number, batch, masks
        self._rows = batch.rows_of(number)
        self._targets = batch.targets[self._rows]
        # Updates per sub-batch are by the gradients of the sub-batch's own mean loss.
        self._updates = trainer.updates_each and len(self._rows) > 0
        self._scale = batch.num_samples / len(self._rows) if self._updates else 1.0
        self._activations = self.gradients = activations
        self.loss = activations.new_zeros(())

    def turns(self) -> Iterator[None]:
        """Run the sub-batch; each turn ends when an exchange has begun."""
        values, last, num_samples = self._activations, self._layers[-1], self._batch.num_samples
        for place, layer in enumerate(self._layers):
            if layer.is_linear:
                future = self._gather(place, values)
                yield
                values = future.result() if place == 0 else future.result().t()
            with self._computing(Kind.FORWARD, layer.name):
                values = layer.forward(self._number, values, self._rows, self._masks)
                if layer is last:
                    terms = layers.loss_terms(values, self._targets, layer.shard)
        sizes, sent = [len(terms)] * self._trainer.group.world_size, self._trainer.sent_of_loss
        what = f"logits of layer {last.name!r}"
        post = partial(begin_gather, terms, None, sizes=sizes, traffic=sent, what=what)
        future = self._begin(Kind.SEND, LOSS, post)
        yield
        loss = layers.CrossEntropy.of(future.result().view(-1, *terms.shape))
        self.loss = loss.losses.sum() / num_samples
        for place, layer in reversed(list(enumerate(self._layers))):
            with self._computing(Kind.BACKWARD, layer.name):
                if layer is last:
                    values = loss.gradients(values, self._targets, layer.shard, 1 / num_samples)
                values = layer.backward_input(self._number, values, self._scale)
                if self._updates and not layer.is_linear:
                    self._trainer.update(layer)
            if layer.is_linear:
                # The gradients by the inputs travel while those by the weights are computed.
                future = self._return(place, values)
                with self._computing(Kind.BACKWARD, weights_of(layer.name)):
                    layer.backward_weight(self._number, self._scale)
                    if self._updates:
                        self._trainer.update(layer)
                yield
                values = future.result() if place == 0 else future.result().t()
        self.gradients = values

    def _computing(self, kind: Kind, part: str) -> Any:
        return self._trainer.recorder.computing(kind, part, self._number)

    def _gather(self, place: int, values: Tensor) -> Future[Tensor]:
        """Begin to gather the input of a linear layer: samples of all ranks, or columns."""
        what, sizes = "activations of the body", self._batch.sizes_of(self._number)
        if place:
            before = self._layers[place - 1]
            what, sizes = f"activations of layer {before.name!r}", before.sharding.sizes
            values = values.t()  # rows are gathered, and these are columns
        codec, sent = self._trainer.config.activations, self._trainer.sent
        post = partial(begin_gather, values, codec, sizes=sizes, traffic=sent, what=what)
        return self._begin(Kind.SEND, self._layers[place].name, post)

    def _return(self, place: int, gradients: Tensor) -> Future[Tensor]:
        """Begin to add up the gradients by a linear layer's input, where the input came from."""
        name, sizes = self._layers[place].name, self._batch.sizes_of(self._number)
        if place:
            gradients, sizes = gradients.t(), self._layers[place - 1].sharding.sizes
        codec, sent = self._trainer.config.activation_gradients, self._trainer.sent
        what = f"activation gradients of layer {name!r}"
        post = partial(begin_return, gradients, codec, sizes=sizes, traffic=sent, what=what)
        return self._begin(Kind.REDUCE, returned_of(name), post)

    def _begin(self, kind: Kind, part: str, post: Callable[..., Pending]) -> Future[Tensor]:
        recorder, number, thread = self._trainer.recorder, self._number, self._trainer.thread
        return thread.begin(
            lambda: post(group=thread.process_group),
            lambda start_s, end_s: recorder.add_exchange(kind, part, start_s, end_s, number),
        )
