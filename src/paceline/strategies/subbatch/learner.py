"""The steps and tests of a model whose head is split: what the training loop asks for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from paceline.codecs.gathering import begin_gather
from paceline.core.errors import NonFinite
from paceline.core.plan import Kind
from paceline.data.dataset import Samples
from paceline.exchange.replica import Replica
from paceline.links.group import Group
from paceline.strategies.subbatch.batch import StepBatch, message
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.dropout import Masks
from paceline.strategies.subbatch.lane import Flight, Lane
from paceline.strategies.subbatch.loss import NUM_VALUES, Loss, partial
from paceline.strategies.subbatch.recording import PassRecorder
from paceline.strategies.subbatch.split import Stage
from paceline.strategies.subbatch.step import Passes
from paceline.strategies.subbatch.traffic import Traffic
from paceline.training.step import SGD, Share

_TEST_BATCH = 256


@dataclass(frozen=True)
class Parallel:
    """A model on one rank: its body, and its outputs of the head's layers.

    `model` holds the parameters of both. `batch_size` is the most samples of a rank in a step, and
    `num_passes` how many sub-batches there are.
    """

    model: nn.Module
    body: nn.Module
    stages: tuple[Stage, ...]
    batch_size: int
    num_passes: int

    @property
    def num_classes(self) -> int:
        """All outputs of the model."""
        return self.stages[-1].widths.whole


@dataclass
class Learner:
    """Takes the steps of a rank; `replica` is its body, whose gradients become those of all.

    Steps count from the first for the masks of dropouts.
    """

    parallel: Parallel
    replica: Replica
    config: SubBatch
    group: Group
    lane: Lane
    recorder: PassRecorder
    sgd: SGD
    seed: int
    samples: Samples
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        each = self.config.updates == "sub-batch"
        self._step = 0
        self._optimizer = self.sgd.optimizer(self.parallel.body if each else self.parallel.model)
        self._own = {
            stage.name: self.sgd.optimizer(stage.module) for stage in self.parallel.stages if each
        }
        self._passes = Passes(
            self.parallel.stages,
            self.config,
            self.group,
            self.lane,
            self.recorder,
            self.traffic,
            self._update if each else None,
        )

    @property
    def traced(self) -> nn.Module:
        """The layers that a recorder watches: the body's."""
        return self.parallel.body

    def step(self, source: Iterator[Share]) -> Tensor:
        """Take a step and return the mean loss of the whole batch, a 0-d tensor.

        NonFinite, on all ranks, names the rank and the layer whose values are not finite.
        """
        recorder = self.recorder
        with recorder.phase(Kind.LOAD):
            share = next(source)
            flight = self._tell(share.targets)
        with recorder.phase(Kind.FORWARD):
            activations = self.replica(share.inputs)
        batch = StepBatch.of(flight.result(), self.group.rank, self.parallel.num_passes)
        masks = Masks(self.seed, self._step, batch.num_rows)
        try:
            errors, loss = self._passes.run(activations, batch, masks)
        except NonFinite as error:
            raise NonFinite(
                f"{error}; if the loss has grown before, choose a smaller learning_rate than "
                f"{self.sgd.learning_rate:g}"
            ) from error
        with recorder.phase(Kind.BACKWARD):
            # The exchange averages over ranks; errors are those of the mean over all samples.
            activations.backward(errors * self.group.world_size)
        with recorder.phase(Kind.STEP):
            self._optimizer.step()
            self._optimizer.zero_grad()
        recorder.end_step()
        self._step += 1
        self.traffic.num_steps += 1
        return loss

    @torch.no_grad()
    def test(self) -> tuple[float, int]:
        """Return the summed loss and the number of right answers on this rank's test samples."""
        # Each rank has running statistics of its own samples: all test the body that rank 0 has.
        self.group.broadcast(self.parallel.body.buffers())
        self.parallel.body.eval()
        loss, correct = 0.0, 0
        ranks = range(self.group.world_size)
        shares = [range(rank, len(self.samples), len(ranks)) for rank in ranks]
        most = max(1, _TEST_BATCH // len(ranks))
        for first in range(0, len(shares[0]), most):
            batch_loss, batch_correct = self._tested([one[first : first + most] for one in shares])
            loss, correct = loss + batch_loss, correct + batch_correct
        self.parallel.body.train()
        return loss, correct

    def _tested(self, shares: Sequence[range]) -> tuple[float, int]:
        """Test some samples of all ranks, which go through the head together."""
        rank, last = self.group.rank, self.parallel.stages[-1]
        sizes = [len(one) for one in shares]
        inputs, targets = self.samples.__getitems__(shares[rank] or [0])
        inputs, targets = inputs.to(self.group.device), targets[: sizes[rank]]
        own = message(targets.to(self.group.device), max(sizes), self.parallel.num_classes)
        batch = StepBatch.of(self._gathered(own, [1] * len(sizes)), rank, 1)
        values = self.parallel.body(inputs)[: sizes[rank]]
        for place, stage in enumerate(self.parallel.stages):
            if stage.is_linear:
                before = self.parallel.stages[place - 1].widths.parts
                values = (
                    self._gathered(values.t(), before).t()
                    if place
                    else self._gathered(values, sizes)
                )
            values = stage.tested(values)
        own = partial(values, batch.targets, last.columns)
        best, places = values.max(1)
        own = torch.cat((own, best.unsqueeze(1), (places + last.columns.first).unsqueeze(1)), 1)
        whole = self._gathered(own, [len(own)] * len(sizes)).view(len(sizes), len(own), -1)
        losses = Loss.of(whole[:, :, :NUM_VALUES]).losses
        chosen = whole[:, :, NUM_VALUES].argmax(0, keepdim=True)
        right = whole[:, :, NUM_VALUES + 1].gather(0, chosen).squeeze(0).long() == batch.targets
        mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        return float(losses[mine].sum()), int(right[mine].sum())

    def _gathered(self, values: Tensor, sizes: Sequence[int]) -> Tensor:
        pending = begin_gather(values, None, self.lane.process_group, sizes, what="a test")
        return pending.wait()

    def _tell(self, targets: Tensor) -> Flight:
        """Begin to tell all ranks the labels of this one's samples."""
        told = message(targets, self.parallel.batch_size, self.parallel.num_classes)
        group, sizes = self.lane.process_group, [1] * self.group.world_size
        traffic = self.traffic.loss
        return self.lane.begin(
            lambda: begin_gather(told, None, group, sizes, traffic=traffic, what="labels")
        )

    def _update(self, stage: Stage) -> None:
        """Update a layer of the head with the gradients of a sub-batch."""
        self._own[stage.name].step()
        self._own[stage.name].zero_grad()
