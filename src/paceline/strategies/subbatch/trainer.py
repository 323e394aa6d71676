"""Run the training steps of a model whose head is split among ranks.

    main      body's forward | fc1/0 fc1/1 | fc2/0 fc2/1 | backward ... | body's backward | update
    thread    [labels]    [fc1/0][fc1/1]    [fc2/0][fc2/1]  [loss/0] ...

fc1/0 is sub-batch 0 in layer fc1 of the head. While it waits for an exchange, the next sub-batch
computes. The order is the same on all ranks. If each sub-batch updates the head, the next sub-batch
only sends its activations in advance, and computes after the current sub-batch has ended.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.codecs.gathering import Pending, RowExchange, Sent
from paceline.core.errors import InvalidInput, NonFinite
from paceline.core.plan import Kind
from paceline.exchange.checkpoints import State
from paceline.exchange.replica import Method, ModelReplica, SingleReplica
from paceline.exchange.step import OF_CLASSES, Learning, Optimize, Share
from paceline.exchange.synchronized import Synchronized
from paceline.links.group import Group
from paceline.record.recorder import Recorder, Role, noted
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.layer_gradients import (
    CommunicationThread,
    LayerGradients,
    begin_sum,
)
from paceline.strategies.subbatch.layers import DropoutMasks, HeadLayer
from paceline.strategies.subbatch.loss import (
    CrossEntropy,
    StepBatch,
    label_message,
    loss_terms,
    num_counted,
)
from paceline.strategies.subbatch.plan import LABELS, LOSS, returned_of, weights_of
from paceline.strategies.subbatch.state import SplitState
from paceline.training.data.batch import call
from paceline.training.models.sharded import Sharding
from paceline.training.recipes.recipe import described

Schedule = Callable[[Optimizer], LRScheduler | None]
# Names of optimizers by what they update: the whole model, or the body. The optimizer of a single
# layer of the head has the layer's name.
WHOLE, BODY = "model", "body"


@dataclass(frozen=True)
class SplitModel:
    """A model on one rank: the body, and this rank's part of each layer of the head.

    `module`: contains body and head. `batch_size`: samples per step of the rank with the most
    samples. `rows_per_sample`: 1, or the number of tokens per sample.
    """

    module: nn.Module
    body: nn.Module
    head: tuple[HeadLayer, ...]
    batch_size: int
    rows_per_sample: int = 1

    @property
    def num_classes(self) -> int:
        """The model's number of outputs per row, over all ranks."""
        return self.head[-1].sharding.num_outputs

    @property
    def shardings(self) -> dict[str, Sharding]:
        """The sharding of each layer of the head, by the layer's name."""
        return {layer.name: layer.sharding for layer in self.head}

    def activations(self, body: Callable[..., Tensor], share: Share, learning: Learning) -> Tensor:
        """Run `body` on this rank's inputs, and return its outputs in the head's dtype.

        Raises InvalidInput unless there is a target for each row of the outputs.
        """
        with learning.autocast(share.targets.device):
            found = call(body, share.inputs)
        if not isinstance(found, Tensor) or found.shape[:-1] != share.targets.shape:
            raise InvalidInput(
                "data",
                f"requires a target for each row: the model's body returns {described(found)}, and "
                f"targets are {described(share.targets)}",
            )
        return found.to(self.head[0].module.weight.dtype)


class SplitTrainer:
    """Takes the training steps of a rank; all ranks create it together.

    `seed`: seed of the dropout masks in the head. `sent`: bytes sent for activations and their
    gradients. `sent_of_loss`: bytes sent for the loss and the labels. Raises InvalidInput if
    gradients are clipped although each sub-batch updates the head.
    """

    def __init__(
        self,
        model: SplitModel,
        config: SubBatch,
        group: Group,
        recorder: Recorder,
        optimizer: Optimize,
        seed: int = 0,
        *,
        learning: Learning = OF_CLASSES,
        schedule: Schedule = lambda optimizer: None,
        thread: CommunicationThread | None = None,
    ) -> None:
        self.updates_each = config.updates == "sub-batch"
        if self.updates_each and learning.clip_norm is not None:
            raise InvalidInput(
                "clip_norm",
                "requires updates=step, because sub-batches update the head before all gradients "
                "are known",
            )
        self.model, self.config, self.group, self.recorder = model, config, group, recorder
        self.learning = learning
        self.thread = thread or CommunicationThread(group)
        self.sent, self.sent_of_loss = Sent(), Sent()
        self._seed = seed
        self.gradients: LayerGradients | None = None
        self.replica = self._replicated()
        self.num_steps = self._num_loaded = 0  # all steps; those before a resumption
        self._num_sub_batches = config.num_sub_batches(model.batch_size)
        updated = {WHOLE: model.module}
        if self.updates_each:
            updated = {BODY: model.body} | {layer.name: layer.module for layer in model.head}
        self.optimizers = {name: optimizer(module) for name, module in updated.items()}
        schedules = {name: schedule(one) for name, one in self.optimizers.items()}
        self.schedules = {name: one for name, one in schedules.items() if one is not None}
        self._state = SplitState(
            model.module, model.shardings, self.optimizers, self.schedules, group
        )

    def _replicated(self) -> ModelReplica:
        """Wrap the body as a replica that averages gradients layer by layer."""
        body, group = self.model.body, self.group
        if group.world_size == 1:
            return SingleReplica(body)
        gradients = LayerGradients(self.thread, group, self.config.gradients)
        self.gradients = gradients
        method = Method("subbatch", lambda group, as_views: gradients, chunk=1)
        return Synchronized(body, method, group=group, gradient_as_bucket_view=True)

    @property
    def sent_nbytes(self) -> dict[str, float]:
        """Mean number of bytes that this rank sends per step, by purpose such as "activations".

        Steps before a resumption are not counted; the dict is empty if no step followed it.
        """
        sent = {
            "activations": self.sent.activations_sent,
            "activation_gradients": self.sent.activation_gradients_sent,
            "loss": self.sent_of_loss.activations_sent,
            "gradients": self.gradients.bytes_sent if self.gradients else 0,
        }
        num_steps = self.num_steps - self._num_loaded
        return {purpose: nbytes / num_steps for purpose, nbytes in sent.items() if num_steps}

    def num_copies(self, parameter: nn.Parameter) -> int:
        """Count a parameter's tensors: itself, its gradient, optimizer state of the same shape."""
        kept = [one.state.get(parameter, {}).values() for one in self.optimizers.values()]
        tensors = [one for values in kept for one in values if isinstance(one, Tensor)]
        return 2 + sum(one.shape == parameter.shape for one in tensors)

    def state(self) -> State:
        """Return the whole state on rank 0, an empty state elsewhere; all ranks must call it."""
        return self._state.gather(self.num_steps)

    def load(self, state: State) -> None:
        """Load this rank's part of a state that `state` returned."""
        self.num_steps = self._num_loaded = self._state.load(state)

    def step(self, source: Iterator[Share]) -> Tensor:
        """Take a training step, and return the batch's mean loss as a 0-d tensor.

        Raises NonFinite on all ranks if a rank sends a value that is not finite; gradients of the
        body are checked only with a codec.
        """
        recorder, model = self.recorder, self.model
        with recorder.phase(Kind.LOAD):
            share = next(source)
        labels = self._begin_labels(share.targets)
        with recorder.phase(Kind.FORWARD):
            activations = model.activations(self.replica, share, self.learning)
        batch = StepBatch.of(labels.result(), self._num_sub_batches)
        masks = DropoutMasks(self._seed, self.num_steps, len(batch.targets))
        try:
            gradients, loss = self._run_head(activations, batch, masks)
        except NonFinite as error:
            hint = "if the loss rose before, choose a smaller learning_rate"
            raise NonFinite(f"{error}; {hint}") from error
        with recorder.phase(Kind.BACKWARD):
            # `gradients` are derivatives of the mean loss over the rows of all ranks, so the body's
            # gradients must be summed over ranks. But replicas average, so scale by their number.
            activations.backward(gradients.view_as(activations) * self.group.world_size)
        with recorder.phase(Kind.STEP):
            if self.learning.clip_norm is not None:
                self._clip(self.learning.clip_norm)
            # The first optimizer updates the model, or the body if sub-batches update the head.
            whole = next(iter(self.optimizers.values()))
            whole.step()
            whole.zero_grad()
            for schedule in self.schedules.values():
                schedule.step()
        recorder.end_step()
        self.num_steps += 1
        return loss

    def _begin_labels(self, targets: Tensor) -> Future[Tensor]:
        model, recorder = self.model, self.recorder
        most = model.batch_size * model.rows_per_sample
        message, group = label_message(targets, most, model.num_classes), self.thread.process_group
        rows, sent = [1] * self.group.world_size, self.sent_of_loss
        return self.thread.begin(
            partial(RowExchange(None, group, rows, sent, "labels").all_gather, message),
            lambda start_s, end_s: recorder.add_exchange(Kind.SEND, LABELS, start_s, end_s),
        )

    def _run_head(
        self, activations: Tensor, batch: StepBatch, masks: DropoutMasks
    ) -> tuple[Tensor, Tensor]:
        """Run all sub-batches through the head, and accumulate the gradients of its parameters.

        Returns the gradients (rows, features) of this rank's activations, and the mean loss.
        """
        parts = activations.detach().tensor_split(len(batch.rows[0]))  # one part per sub-batch
        passes = [
            SubBatchPass(self, number, batch, masks, part.flatten(0, -2))
            for number, part in enumerate(parts)
        ]
        running = [one.run() for one in passes]
        if self.updates_each:
            next(running[0])
            for one, following in zip(running, [*running[1:], iter(())], strict=True):
                next(following, None)  # the next sub-batch begins to send, but does not compute
                for _ in one:
                    pass
        else:
            while running:
                running = [one for one in running if next(one, "over") != "over"]
        gradients = torch.cat([one.gradients for one in passes])
        return gradients, torch.stack([one.loss for one in passes]).sum()

    def update(self, layer: HeadLayer) -> None:
        """Update a layer of the head, and clear its gradients."""
        self.optimizers[layer.name].step()
        self.optimizers[layer.name].zero_grad()

    @torch.no_grad()
    def _clip(self, most: float) -> None:
        """Clip the gradient norm of the whole model to `most`.

        To compute the norm, ranks sum the squared norms of their parts of the head.
        """
        body, head = list(self.model.body.parameters()), self.model.head
        own = [parameter for layer in head for parameter in layer.parameters]
        of_body, squares = (_norm(part).square() for part in (body, own))
        if self.group.world_size > 1:
            squares = self.thread.begin(
                partial(begin_sum, squares, self.thread.process_group)
            ).result()
        clip_grads_with_norm_([*body, *own], most, (of_body + squares).sqrt())

    def close(self) -> None:
        """Close the replica and the thread."""
        self.replica.close()
        self.thread.close()


def _norm(parameters: list[nn.Parameter]) -> Tensor:
    return get_total_norm([one.grad for one in parameters if one.grad is not None])


class SubBatchPass:
    """Runs the forward and the backward pass of one sub-batch through the head.

    `activations`: the outputs of this rank's body for the sub-batch, of shape (N, features). After
    `run`, `gradients` has the gradients of `activations`, and `loss` has the sub-batch's summand of
    the mean loss.
    """

    def __init__(
        self,
        trainer: SplitTrainer,
        number: int,
        batch: StepBatch,
        masks: DropoutMasks,
        activations: Tensor,
    ) -> None:
        self._trainer, self._layers = trainer, trainer.model.head
        self._number, self._batch, self._masks = number, batch, masks
        self._rows = batch.rows_of(number)
        self._targets = batch.targets[self._rows]
        self._of_row = 1 / max(1, batch.num_counted)  # weight of a row in the batch's mean loss
        # Gradients belong to the batch's mean loss. If each sub-batch updates the head, the factor
        # `_scale` turns the head's parameter gradients into those of the sub-batch's mean loss.
        counted = num_counted(self._targets) if trainer.updates_each else 0
        self._updates = counted > 0
        self._scale = batch.num_counted / counted if counted else 1.0
        self._activations = self.gradients = activations
        self.loss = activations.new_zeros(())

    def run(self) -> Iterator[None]:
        """Run the sub-batch; yield after starting each exchange, to let other sub-batches run."""
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
        what, sent = f"logits of layer {last.name!r}", self._trainer.sent_of_loss
        exchange = RowExchange(None, self._trainer.thread.process_group, sizes, sent, what)
        future = self._begin(Kind.SEND, LOSS, partial(exchange.all_gather, terms))
        yield
        loss = CrossEntropy.of(future.result().view(num_ranks, *terms.shape), self._targets)
        self.loss = loss.losses.sum() * self._of_row
        for place, layer in reversed(list(enumerate(self._layers))):
            with self._computing(Kind.BACKWARD, layer.name):
                if layer is last:
                    values = loss.gradients(values, self._targets, layer.shard, self._of_row)
                values = layer.backward_input(self._number, values, self._scale)
                if self._updates and not layer.is_linear:
                    self._trainer.update(layer)
            if layer.is_linear:
                # Begin to send input gradients first, to overlap with computing weight gradients.
                future = self._return(place, values)
                with self._computing(Kind.BACKWARD, weights_of(layer.name)):
                    layer.backward_weight(self._number, self._scale)
                    if self._updates:
                        self._trainer.update(layer)
                yield
                values = future.result() if place == 0 else future.result().t()
        self.gradients = values

    @contextmanager
    def _computing(self, kind: Kind, part: str) -> Iterator[None]:
        recorded = noted(self._trainer.recorder, kind, part, Role.SUB_BATCH, self._number)
        with recorded, self._trainer.learning.autocast(self._activations.device):
            yield

    def _gather(self, place: int, values: Tensor) -> Future[Tensor]:
        """Start gathering the inputs of the head's layer with index `place` from all ranks.

        The first layer gathers rows, because each rank has the body's outputs for some samples. A
        later layer gathers columns, because each rank has some outputs of the previous layer.
        """
        what, sizes = "activations of the body", self._batch.sizes_of(self._number)
        if place:
            before = self._layers[place - 1]
            what, sizes = f"activations of layer {before.name!r}", before.sharding.sizes
            values = values.t()  # transpose, because `all_gather` gathers rows
        codec, group = self._trainer.config.activations, self._trainer.thread.process_group
        exchange = RowExchange(codec, group, sizes, self._trainer.sent, what)
        name = self._layers[place].name
        return self._begin(Kind.SEND, name, partial(exchange.all_gather, values))

    def _return(self, place: int, gradients: Tensor) -> Future[Tensor]:
        """Start a reduce-scatter: each input gradient is summed on the rank that sent the input.

        `place`: index of the linear layer in the head.
        """
        name, sizes = self._layers[place].name, self._batch.sizes_of(self._number)
        if place:
            gradients, sizes = gradients.t(), self._layers[place - 1].sharding.sizes
        codec, group = self._trainer.config.activation_gradients, self._trainer.thread.process_group
        what = f"activation gradients of layer {name!r}"
        exchange = RowExchange(codec, group, sizes, self._trainer.sent, what, in_forward=False)
        return self._begin(
            Kind.REDUCE, returned_of(name), partial(exchange.reduce_scatter, gradients)
        )

    def _begin(self, kind: Kind, part: str, post: Callable[[], Pending]) -> Future[Tensor]:
        recorder, number, thread = self._trainer.recorder, self._number, self._trainer.thread
        return thread.begin(
            post,
            lambda start_s, end_s: recorder.add_exchange(kind, part, start_s, end_s, number),
        )
