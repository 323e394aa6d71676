"""One worker's replica: its inner steps, its outer gradients, and what it takes from the group."""

import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoints.state import (
    load_optimizer_state,
    load_schedule_state,
    optimizer_state,
    random_state,
    restore_random_state,
    schedule_state,
)
from paceline.checkpoints.tensor_file import Tensors
from paceline.codecs.stand_ins import stand_ins_for
from paceline.exchange.learner import evaluate
from paceline.exchange.setup import TrainingSetup
from paceline.exchange.step import Share, train_step
from paceline.links.group import Group
from paceline.models.paced import Stretched
from paceline.record.clock import clock_for
from paceline.record.recorder import Recorder
from paceline.strategies.local.batches import Prefetched, UnitBatches
from paceline.strategies.local.config import Local
from paceline.strategies.local.exchange import Exchanged
from paceline.strategies.local.outer import flatten
from paceline.strategies.local.protocol import Loss, UnitsHeader

State = tuple[Tensors, dict[str, Any]]  # tensors by KIND/NAME, and plain values


@dataclass
class Round:
    """A round of this worker: its units, and how many inner steps of it are done."""

    number: int
    units: Sequence[int]
    first_step: float
    num_steps: float
    shares: Iterator[Share]
    done: int = 0

    @property
    def step_of_run(self) -> float:
        """The step of the run at which this worker is: it may be faster than the others."""
        return self.first_step + self.num_steps * self.done / max(1, len(self.units))


class Trainer:
    """A replica that takes inner steps by itself. `batches`: of units; None in a rehearsal."""

    def __init__(self, setup: TrainingSetup, config: Local, group: Group, seed: int) -> None:
        self._setup, self._config, self._group = setup, config, group
        self.model = setup.model
        self.exchanged = Exchanged(setup.model, config)
        self._stretched: Stretched | None = None
        self._clock = clock_for(group.device)
        self._recorder = Recorder(self._clock, "", group.rank)
        self._prefetched: Prefetched | None = None
        self.batches: UnitBatches | None = None
        if setup.recipe is not None:
            size = round(setup.samples_per_step)
            self.batches = UnitBatches(setup.recipe.samples, size, group.world_size, seed)
            self._prefetched = Prefetched(self.batches, group.device)
        self.round: Round | None = None
        self._losses: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._carried: defaultdict[int, float] = defaultdict(float)  # sums from a checkpoint
        self._sizes: defaultdict[int, int] = defaultdict(int)
        self._weights = [0] * config.fragments
        self._busy_s, self._num_busy = 0.0, 0
        # Ranks must not drop out the same units.
        torch.manual_seed(seed + group.rank)
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Begin with a new optimizer, whose schedule is at the run's first step."""
        self._optimizer = self._setup.optimizer(self.model)
        self._schedule = self._setup.schedule(self._optimizer)
        self._scheduled = 0

    def stretch(self) -> None:
        """Let layers take longer from now on, in a rehearsal that asks for it."""
        if self._setup.factor is not None and self._stretched is None:
            self._stretched = Stretched(self.model, self._setup.factor)

    def begin(self, number: int, header: UnitsHeader, done: int = 0) -> Round:
        """Begin a round with these units, of which `done` were trained on before."""
        if self._prefetched is None:
            shares = iter(self._setup.source(0))
        else:
            shares = self._prefetched(header.units[done:])
        known = number, header.units, header.first_step, header.num_steps, shares
        self.round = Round(*known, done)
        return self.round

    def take(self, count: int) -> None:
        """Take inner steps of the round."""
        current = self.round
        assert current is not None
        started = time.monotonic()
        self.model.train()
        for _ in range(count):
            self._go_to(current.step_of_run)
            share = next(current.shares)
            loss = train_step(
                *(self.model, self._optimizer, iter((share,)), self._recorder),
                self._setup.learning,
            )
            self._note(current.units[current.done], share.num_samples, loss)
            current.done += 1
        self._clock.seconds([self._clock.mark()])  # waits for the device
        self._busy_s += time.monotonic() - started
        self._num_busy += count
        self._recorder.step_ends()  # forgets them

    def _note(self, unit: int, num_samples: int, loss: Tensor) -> None:
        epoch = 0 if self.batches is None else self.batches.place(unit).epoch
        self._losses[epoch].append(loss.detach() * num_samples)
        self._sizes[epoch] += num_samples
        self._weights = [weight + num_samples for weight in self._weights]

    def _go_to(self, step_of_run: float) -> None:
        """Let the schedule follow the run, whatever part of its steps this worker takes."""
        if self._schedule is None:
            return
        with warnings.catch_warnings():
            # A worker that joins later catches up before its optimizer's first step.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            while self._scheduled < int(step_of_run):
                self._schedule.step()
                self._scheduled += 1

    def losses(self) -> tuple[Loss, ...]:
        """Return the losses since the last call, by epoch."""
        found = tuple(
            Loss(epoch=epoch, num_samples=size, total=self._total(epoch))
            for epoch, size in self._sizes.items()
        )
        for counted in (self._losses, self._carried, self._sizes):
            counted.clear()
        return found

    def _total(self, epoch: int) -> float:
        """Return the summed loss, in float64: the same wherever a checkpoint divides the sum."""
        own = self._losses.get(epoch)
        return self._carried[epoch] + (float(torch.stack(own).cpu().double().sum()) if own else 0.0)

    def step_s(self) -> float | None:
        """Return the mean seconds of the inner steps since the last call."""
        found = self._busy_s / self._num_busy if self._num_busy else None
        self._busy_s, self._num_busy = 0.0, 0
        return found

    def outgoing(self, fragment: int) -> tuple[int, Tensor]:
        """Return the samples since the fragment was sent last, and its outer gradient."""
        outer = self.exchanged.outer
        gradient = outer.gradient(fragment, self.exchanged.fragments[fragment])
        weight, self._weights[fragment] = self._weights[fragment], 0
        # In a rehearsal that is paced nothing is learnt, and parameters stay as they are.
        if self._setup.times is not None and (make := stand_ins_for(self._config.codec)):
            gradient = make(gradient)
        return weight, gradient

    def receive(self, fragment: int, parts: Sequence[tuple[int, Tensor]]) -> None:
        """Take the outer step with all workers' parts, and the group's parameters."""
        self.exchanged.step(fragment, parts)
        own = self.exchanged.fragments[fragment]
        self.exchanged.outer.load_into(fragment, own, self._config.mixing)

    def take_over(self, outer: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        """Take the group's parameters, momentum and buffers, as one that joins."""
        own = self.exchanged.outer
        for vector, found in zip((*own.values, *own.momenta), outer, strict=True):
            vector.copy_(found)
        for number, fragment in enumerate(self.exchanged.fragments):
            own.load_into(number, fragment)
        self.load_buffers(buffers)
        self._weights = [0] * self._config.fragments
        self.losses()

    def load_buffers(self, buffers: Sequence[Tensor]) -> None:
        """Take the group's buffers, such as running means."""
        with torch.no_grad():
            for buffer, found in zip(self.model.buffers(), buffers, strict=True):
                buffer.copy_(found)

    def test(self, number: int, count: int) -> tuple[int, float, float]:
        """Test the group's parameters on one of `count` parts of the samples for testing.

        Returns the samples, their summed loss and their summed score.
        """
        recipe, outer = self._setup.recipe, self.exchanged.outer
        assert recipe is not None
        samples = recipe.test_samples
        assert samples is not None
        kept = [flatten(one) for one in self.exchanged.fragments]
        for fragment, parameters in enumerate(self.exchanged.fragments):
            outer.load_into(fragment, parameters)
        part = replace(self._group, rank=number, world_size=count)
        loss, score = evaluate(self.model, samples, part, recipe, self._setup.learning)
        mine, outer.values = outer.values, kept
        for fragment, parameters in enumerate(self.exchanged.fragments):
            outer.load_into(fragment, parameters)
        outer.values = mine
        return len(range(number, len(samples), count)), loss, score

    def state(self) -> State:
        """Return what is this worker's own: the rest of the state is the group's."""
        named = list(self.model.named_parameters())
        tensors, values = optimizer_state(self._optimizer, named)
        numbers, random_values = random_state(self._group.device)
        found = {f"optimizer/{name}": one for name, one in tensors.items()}
        found |= {f"random/{name}": one for name, one in numbers.items()}
        found |= {f"feedback/{name}": one for name, one in self.exchanged.feedback().items()}
        for number, parameters in enumerate(self.exchanged.fragments):
            found[f"parameters/{number}"] = flatten(parameters)
        found |= {f"buffers/{i}": one for i, one in enumerate(self.model.buffers())}
        known = {
            "optimizer": values,
            "random": random_values,
            "scheduled": self._scheduled,
            "weights": list(self._weights),
            # Of steps beside an exchange, which the hub has not been told of.
            "losses": [[epoch, size, self._total(epoch)] for epoch, size in self._sizes.items()],
            "schedule": None if self._schedule is None else schedule_state(self._schedule),
        }
        return found, known

    def load(self, state: State) -> None:
        """Take over what this worker has saved; InvalidInput if it does not fit."""
        tensors, values = state
        of = _by_kind(tensors)
        named = list(self.model.named_parameters())
        load_optimizer_state(self._optimizer, named, of("optimizer"), values["optimizer"])
        if self._schedule is not None:
            load_schedule_state(self._schedule, values["schedule"])
        self._scheduled, self._weights = values["scheduled"], list(values["weights"])
        for epoch, size, total in values["losses"]:
            self._carried[epoch] += total
            self._sizes[epoch] += size
        self.exchanged.load_feedback(of("feedback"))
        outer, own = self.exchanged.outer, of("parameters")
        mine, outer.values = outer.values, [own[str(i)] for i in range(len(outer.values))]
        for number, fragment in enumerate(self.exchanged.fragments):
            outer.load_into(number, fragment)
        outer.values = mine
        buffers = of("buffers")
        self.load_buffers([buffers[str(i)] for i in range(len(buffers))])
        restore_random_state(self._group.device, of("random"), values["random"])

    def close(self) -> None:
        """End the thread that reads batches, and let layers take the time they need."""
        if self._prefetched is not None:
            self._prefetched.close()
        if self._stretched is not None:
            self._stretched.remove()


def _by_kind(tensors: Tensors) -> Callable[[str], Tensors]:
    def of(kind: str) -> Tensors:
        prefix = f"{kind}/"
        return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

    return of
