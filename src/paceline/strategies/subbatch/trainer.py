"""Take the training steps of a model with a sharded head.

    main      body's forward | fc1/0 fc1/1 | fc2/0 fc2/1 | backward ... | body's backward | update
    thread    [labels]    [fc1/0][fc1/1]    [fc2/0][fc2/1]  [loss/0] ...

The sub-batches of a step (see `plan`) take turns: while one waits for an exchange, the next
computes. All ranks take the same turns, so their exchanges have the same order. With updates per
sub-batch, a sub-batch ends before the next one computes, but after that one's activations are sent.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.codecs.gathering import Sent, begin_gather
from paceline.core.errors import InvalidInput, NonFinite
from paceline.core.plan import Kind
from paceline.exchange.checkpoints import State
from paceline.exchange.layer_gradients import CommunicationThread, LayerGradients, begin_sum
from paceline.exchange.replica import Method, ModelReplica, SingleReplica
from paceline.exchange.step import OF_CLASSES, Learning, Optimize, Share
from paceline.exchange.synchronized import Synchronized
from paceline.links.group import Group
from paceline.record.recorder import Recorder
from paceline.strategies.subbatch.batch import StepBatch, label_message
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.layers import DropoutMasks, HeadLayer
from paceline.strategies.subbatch.plan import LABELS
from paceline.strategies.subbatch.state import gather_state, load_state
from paceline.strategies.subbatch.sub_batch import HeadPasses, SubBatchPass
from paceline.training.data.batch import call
from paceline.training.models.sharded import Sharding
from paceline.training.recipes.recipe import described

Schedule = Callable[[Optimizer], LRScheduler | None]
WHOLE, BODY = "model", "body"  # names of optimizers; others have the name of a head layer


@dataclass(frozen=True)
class SplitModel:
    """A model on one rank: the body, and the rank's outputs of the head's layers.

    `module` has the parameters of both. `batch_size`: largest number of a rank's samples in a step.
    `rows_per_sample`: 1, or the number of a sample's tokens.
    """

    module: nn.Module
    body: nn.Module
    head: tuple[HeadLayer, ...]
    batch_size: int
    rows_per_sample: int = 1

    @property
    def num_classes(self) -> int:
        """The number of the model's outputs per row."""
        return self.head[-1].sharding.num_outputs

    @property
    def shardings(self) -> dict[str, Sharding]:
        """The sharding of the head's layers, by name."""
        return {layer.name: layer.sharding for layer in self.head}

    def activations(self, body: Callable[..., Tensor], share: Share, learning: Learning) -> Tensor:
        """Return the body's outputs (samples, ..., features) in the type of the head."""
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
    """Takes the steps of a rank; all ranks create it together.

    `seed`: of the dropout masks. `sent`: bytes sent for the head; `sent_of_loss`: for loss and
    labels. Both include message headers of 40 bytes. InvalidInput for clipping with updates per
    sub-batch.
    """

    def __init__(
        self,
        model: SplitModel,
        config: SubBatch,
        group: Group,
        recorder: Recorder,
        optimizer: Optimize,
        learning_rate: float | None = None,
        seed: int = 0,
        *,
        learning: Learning = OF_CLASSES,
        schedule: Schedule = lambda optimizer: None,
        thread: CommunicationThread | None = None,
    ) -> None:
        updates_each = config.updates == "sub-batch"
        if updates_each and learning.clip_norm is not None:
            raise InvalidInput(
                "clip_norm",
                "requires updates=step, because sub-batches update the head before all gradients "
                "are known",
            )
        self.model, self.config, self.group, self.recorder = model, config, group, recorder
        self.learning = learning
        self.thread = thread or CommunicationThread(group)
        self.sent, self.sent_of_loss = Sent(), Sent()
        self._learning_rate, self._seed = learning_rate, seed
        self.gradients: LayerGradients | None = None
        self.replica = self._replicated()
        self.num_steps = 0
        self._num_sub_batches = config.num_sub_batches(model.batch_size)
        updated = {BODY if updates_each else WHOLE: model.body if updates_each else model.module}
        updated |= {layer.name: layer.module for layer in model.head if updates_each}
        self.optimizers = {name: optimizer(module) for name, module in updated.items()}
        schedules = {name: schedule(one) for name, one in self.optimizers.items()}
        self.schedules = {name: one for name, one in schedules.items() if one is not None}
        self._passes = HeadPasses(
            *(model.head, config, learning, self.thread, recorder, self.sent, self.sent_of_loss),
            update=self._update if updates_each else None,
        )

    def _replicated(self) -> ModelReplica:
        """Wrap the body as a replica that averages gradients layer by layer."""
        body, group = self.model.body, self.group
        if group.world_size == 1:
            return SingleReplica(body)
        gradients = LayerGradients("subbatch", self.thread, group, self.config.gradients)
        self.gradients = gradients
        method = Method("subbatch", lambda group, as_views: gradients)
        return Synchronized(body, method, group=group, gradient_as_bucket_view=True)

    @property
    def sent_nbytes(self) -> dict[str, float]:
        """Bytes that this rank sends in a step, by purpose."""
        sent = {
            "activations": self.sent.activations_sent,
            "activation_gradients": self.sent.activation_gradients_sent,
            "loss": self.sent_of_loss.activations_sent,
            "gradients": self.gradients.bytes_sent if self.gradients else 0,
        }
        return {purpose: nbytes / max(1, self.num_steps) for purpose, nbytes in sent.items()}

    def num_copies(self, parameter: nn.Parameter) -> int:
        """Count the tensors of a parameter: itself, its gradient, the optimizer's."""
        kept = [one.state.get(parameter, {}).values() for one in self.optimizers.values()]
        tensors = [one for values in kept for one in values if isinstance(one, Tensor)]
        return 2 + sum(one.shape == parameter.shape for one in tensors)

    def state(self) -> State:
        """Return the whole state on rank 0; all ranks call it together."""
        own = self.model.module, self.model.shardings, self.optimizers, self.schedules
        return gather_state(*own, self.num_steps, self.group)

    def load(self, state: State) -> None:
        """Load this rank's part of a state."""
        own = self.model.module, self.model.shardings, self.optimizers, self.schedules
        self.num_steps = load_state(state, *own, self.group.rank)

    def step(self, source: Iterator[Share]) -> Tensor:
        """Take a step and return the batch's mean loss, a 0-d tensor.

        Raises NonFinite on all ranks, with the rank and the layer whose values are not finite.
        """
        recorder, model = self.recorder, self.model
        with recorder.phase(Kind.LOAD):
            share = next(source)
        labels = self._begin_labels(share.targets)
        with recorder.phase(Kind.FORWARD):
            activations = model.activations(self.replica, share, self.learning)
        batch = StepBatch.of(labels.result(), self._num_sub_batches)
        masks = DropoutMasks(self._seed, self.num_steps, batch.num_rows)
        try:
            gradients, loss = self._run_head(activations, batch, masks)
        except NonFinite as error:
            rate = "" if self._learning_rate is None else f" than {self._learning_rate:g}"
            raise NonFinite(
                f"{error}; if the loss rose before, choose a smaller learning_rate{rate}"
            ) from error
        with recorder.phase(Kind.BACKWARD):
            # The exchange averages over ranks, but these are gradients of the mean over all rows.
            activations.backward(gradients.view_as(activations) * self.group.world_size)
        with recorder.phase(Kind.STEP):
            if self.learning.clip_norm is not None:
                self._clip(self.learning.clip_norm)
            whole = next(iter(self.optimizers.values()))  # of the model, or of its body
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
            partial(begin_gather, message, None, group, rows, traffic=sent, what="labels"),
            lambda start_s, end_s: recorder.add_exchange(Kind.SEND, LABELS, start_s, end_s),
        )

    def _run_head(
        self, activations: Tensor, batch: StepBatch, masks: DropoutMasks
    ) -> tuple[Tensor, Tensor]:
        """Run the head forward and backward, and accumulate its parameters' gradients.

        Returns the gradients (rows, features) of this rank's activations, and the batch's mean
        loss, a 0-d tensor.
        """
        parts = activations.detach().tensor_split(len(batch.rows[0]))  # of samples
        passes = [
            SubBatchPass(self._passes, number, batch, masks, part.flatten(0, -2))
            for number, part in enumerate(parts)
        ]
        turns = [one.turns() for one in passes]
        if self._passes.update is not None:
            next(turns[0])
            for one, following in zip(turns, [*turns[1:], iter(())], strict=True):
                next(following, None)  # its first turn sends activations
                for _ in one:
                    pass
        else:
            while turns:
                turns = [one for one in turns if next(one, "over") != "over"]
        gradients = torch.cat([one.gradients for one in passes])
        return gradients, torch.stack([one.loss for one in passes]).sum()

    def _update(self, layer: HeadLayer) -> None:
        """Update a layer of the head."""
        self.optimizers[layer.name].step()
        self.optimizers[layer.name].zero_grad()

    @torch.no_grad()
    def _clip(self, most: float) -> None:
        """Clip the norm of the model's gradients.

        Ranks exchange only the sum of squares of their parts of the head.
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
