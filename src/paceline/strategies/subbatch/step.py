"""A training step in sub-batches, as `plan` draws it, on one rank.

    main     body's forward | fc1/0 fc1/1 | fc2/0 fc2/1 | errors ... | body's backward | update
    lane        [fc1/0][fc1/1]    [fc2/0][fc2/1]  [loss/0] ...

All passes are under way together, and take turns: while one waits for what it has sent or asked
for, the next computes. All ranks take the same turns, and so begin their exchanges in the same
order. With updates per sub-batch a pass ends before the next begins to compute, whose activations
are on their way by then.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.codecs.gathering import begin_gather, begin_return
from paceline.core.plan import Kind
from paceline.links.group import Group
from paceline.strategies.subbatch.batch import StepBatch
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.dropout import Masks
from paceline.strategies.subbatch.lane import Flight, Lane
from paceline.strategies.subbatch.loss import NUM_VALUES, Loss, partial
from paceline.strategies.subbatch.recording import PassRecorder
from paceline.strategies.subbatch.split import Rows, Stage
from paceline.strategies.subbatch.traffic import Traffic

Update = Callable[[Stage], None]


@dataclass(frozen=True)
class Passes:
    """The passes of a step through the stages of a head.

    `update` is called with each stage that has all gradients of a sub-batch, where weights are
    updated per sub-batch, and is None otherwise.
    """

    stages: Sequence[Stage]
    config: SubBatch
    group: Group
    lane: Lane
    recorder: PassRecorder
    traffic: Traffic
    update: Update | None

    def run(self, activations: Tensor, batch: StepBatch, masks: Masks) -> tuple[Tensor, Tensor]:
        """Return the errors of this rank's samples, and the loss of all samples, a 0-d tensor.

        Errors are the derivatives of the mean loss of the whole batch by `activations`, and the
        gradients of the head's parameters have accumulated.
        """
        count = len(batch.parts[0])
        errors: list[Tensor] = [activations.detach()] * count
        losses: list[Tensor] = [activations.new_zeros(())] * count
        passes = [
            _Pass(self, number, batch, Rows(batch.places(number), masks)) for number in range(count)
        ]
        turns = [one.turns(activations.detach(), errors, losses) for one in passes]
        if self.update is None:
            while turns:
                turns = [one for one in turns if next(one, "over") != "over"]
        else:
            _one_after_another(turns)
        return torch.cat(errors), torch.stack(losses).sum()


def _one_after_another(turns: Sequence[Iterator[None]]) -> None:
    next(turns[0])
    for number, one in enumerate(turns):
        if number + 1 < len(turns):
            next(turns[number + 1])  # which only sends what the pass begins with
        for _ in one:
            pass


@dataclass(frozen=True)
class _Pass:
    """One sub-batch on its way through the head."""

    of: Passes
    number: int
    batch: StepBatch
    rows: Rows

    def turns(
        self, activations: Tensor, errors: list[Tensor], losses: list[Tensor]
    ) -> Iterator[None]:
        """Put the sub-batch through; each turn ends with something that is on its way.

        In the end this rank's `errors` and the `losses` of the pass are there.
        """
        values = activations[self.batch.own(self.number)]
        for place, stage in enumerate(self.of.stages):
            if stage.is_linear:
                flight = self._gather(place, values)
                yield
                values = self._whole(place, flight)
            with self.of.recorder.computing(Kind.FORWARD, stage.name, self.number):
                values = stage.forward(self.number, values, self.rows)
                if place == len(self.of.stages) - 1:
                    told = partial(values, self._targets, stage.columns)
        flight = self._tell(told)
        yield
        loss = Loss.of(flight.result().view(-1, len(told), NUM_VALUES))
        losses[self.number] = loss.losses.sum() / self.batch.num_rows
        of_outputs = values
        for place in reversed(range(len(self.of.stages))):
            stage = self.of.stages[place]
            with self.of.recorder.computing(Kind.BACKWARD, stage.name, self.number):
                if place == len(self.of.stages) - 1:
                    scale = 1 / self.batch.num_rows
                    of_outputs = loss.gradients(values, self._targets, stage.columns, scale)
                of_outputs = stage.errors(self.number, of_outputs, self._scale)
                if not stage.is_linear:
                    self._update(stage)
            if stage.is_linear:
                flight = self._return(place, of_outputs)
                with self.of.recorder.computing(
                    Kind.BACKWARD, f"{stage.name}:weights", self.number
                ):
                    stage.weights(self.number, self._scale)
                    self._update(stage)
                yield
                of_outputs = flight.result() if place == 0 else flight.result().t()
        errors[self.number] = of_outputs

    @property
    def _targets(self) -> Tensor:
        return self.batch.targets[self.rows.places]

    @property
    def _scale(self) -> float:
        """What makes of gradients of the batch's mean loss those of the sub-batch's, if wanted."""
        own = len(self.rows.places)
        return self.batch.num_rows / own if self.of.update is not None and own else 1.0

    def _update(self, stage: Stage) -> None:
        if self.of.update is not None and self.rows.places:
            self.of.update(stage)

    def _gather(self, place: int, values: Tensor) -> Flight:
        """Begin to gather what a linear layer works on: samples of all ranks, or columns."""
        of, stage = self.of, self.of.stages[place]
        if place == 0:
            what, sizes = "activations of the body", self.batch.sizes(self.number)
        else:
            before = of.stages[place - 1]
            what, sizes = f"activations of layer {before.name!r}", before.widths.parts
            values = values.t()
        return of.lane.begin(
            lambda: begin_gather(
                values,
                of.config.activations,
                of.lane.process_group,
                sizes,
                traffic=of.traffic.head,
                what=what,
            ),
            self._noted(Kind.SEND, f"{stage.name}/{self.number}"),
        )

    def _whole(self, place: int, flight: Flight) -> Tensor:
        found = flight.result()
        return found if place == 0 else found.t()

    def _return(self, place: int, errors: Tensor) -> Flight:
        """Begin to add up the errors of a linear layer's input, where it came from."""
        of, stage = self.of, self.of.stages[place]
        sizes = self.batch.sizes(self.number)
        if place:
            errors, sizes = errors.t(), of.stages[place - 1].widths.parts
        return of.lane.begin(
            lambda: begin_return(
                errors,
                of.config.errors,
                of.lane.process_group,
                sizes,
                traffic=of.traffic.head,
                what=f"errors of layer {stage.name!r}",
            ),
            self._noted(Kind.REDUCE, f"{stage.name}:errors/{self.number}"),
        )

    def _tell(self, told: Tensor) -> Flight:
        """Begin to tell all ranks what this one knows of the loss."""
        of = self.of
        return of.lane.begin(
            lambda: begin_gather(
                told,
                None,
                of.lane.process_group,
                [len(told)] * of.group.world_size,
                traffic=of.traffic.loss,
                what=f"logits of layer {of.stages[-1].name!r}",
            ),
            self._noted(Kind.SEND, f"loss/{self.number}"),
        )

    def _noted(self, kind: Kind, label: str) -> Callable[[float, float], None]:
        recorder = self.of.recorder
        return lambda start_s, end_s: recorder.add_exchange(kind, label, start_s, end_s)
