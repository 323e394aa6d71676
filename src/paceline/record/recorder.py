"""Records one rank's steps as spans under the names that plans give their tasks.

Every step leaves one mark at its end. A traced step leaves marks at the borders of its phases, at
the first entry of each layer in forward, and when each layer's gradients are ready in backward.
The time between the last gradient and the end of backward is no layer's: it is spent waiting for
the exchange. A layer that leaves no mark (never entered, or without gradients) has an empty share,
where `describe` has it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.core.cost import compute_lane, exchange_lane
from paceline.core.plan import Kind, Resource, task_name
from paceline.core.timeline import Span
from paceline.models.layers import LayerModule, layers_of
from paceline.record.clock import Clock, HostClock
from paceline.record.shares import before, between_copies, between_entries, end_of_run, up_to_last


@dataclass
class _Phase:
    """Part of a traced step; `borders` pairs layers with where their share begins or ends."""

    step: int
    kind: Kind
    start: Any
    end: Any = None
    borders: list[tuple[str, Any]] = field(default_factory=list)


class _Transfer(NamedTuple):
    """What this rank did alone for an exchange."""

    step: int
    kind: Kind
    part: str
    start: Any
    end: Any


@dataclass
class _Exchange:
    """A collective: from when this rank joined it until it was done here."""

    step: int
    kind: Kind
    part: str
    start: Any
    end: Any = None


class Recorder:
    """The record of one rank, whose device has the given name in the plan.

    `step` counts the steps of the whole run. Only between `start_trace` and `stop_trace` are spans
    recorded; their step numbers count from the first traced step, as those of a plan do.
    """

    def __init__(self, clock: Clock, device: str, rank: int) -> None:
        self._clock = clock
        self._device = device
        self._rank = rank
        self._hooks: list[RemovableHandle] = []
        self._layers: list[str] = []
        self._step = 0
        self._phases: list[_Phase] = []
        self._exchanges: list[_Exchange] = []
        self._transfers: list[_Transfer] = []
        self._sums: list[tuple[int, Span]] = []
        self._step_ends: list[Any] = []
        self._phase: _Phase | None = None
        self._kept: int | None = None
        self.tracing = False

    def start_trace(self, model: nn.Module) -> None:
        """Record the spans of the following steps of `model`, until `stop_trace`."""
        self._begin_trace()
        layers = layers_of(model)
        self._layers = [layer.name for layer in layers]
        for layer in layers:
            self._watch(layer)

    def start_phases(self, num_steps: int) -> None:
        """Record phases and exchanges, but no layers; keep the last `num_steps` steps or more."""
        self._begin_trace()
        self._layers, self._kept = [], num_steps

    def _begin_trace(self) -> None:
        self.tracing, self._kept = True, None
        self._step = 0
        self._phases, self._exchanges, self._transfers, self._sums = [], [], [], []

    def stop_trace(self) -> None:
        """Remove all hooks; the spans stay."""
        self.tracing = False
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @contextmanager
    def phase(self, kind: Kind) -> Iterator[None]:
        """Record what runs inside as a part of this step."""
        self.begin_phase(kind)
        yield
        self.end_phase()

    def begin_phase(self, kind: Kind) -> None:
        """Record what follows as a part of this step, until `end_phase`."""
        if self.tracing:
            self._phase = _Phase(self._step, kind, self._clock.mark())

    @property
    def idle(self) -> bool:
        """Whether it records, and no phase has begun."""
        return self.tracing and self._phase is None

    def end_phase(self) -> None:
        """End the phase, if one has begun."""
        if self._phase is not None:
            self._phase.end = self._clock.mark()
            self._phases.append(self._phase)
            self._phase = None

    def end_step(self) -> None:
        """Count the step, and note when it ended."""
        self._step += 1
        if self._kept is None:
            self._step_ends.append(self._clock.mark())
        elif self._step % self._kept == 0:  # not in each step: it looks at all that is kept
            self._forget(self._step - self._kept)

    def _forget(self, first: int) -> None:
        self._phases = [phase for phase in self._phases if phase.step >= first]
        self._exchanges = [exchange for exchange in self._exchanges if exchange.step >= first]
        self._transfers = [transfer for transfer in self._transfers if transfer.step >= first]
        self._sums = [(step, span) for step, span in self._sums if step >= first]

    def step_ends(self) -> list[float]:
        """Return when the steps ended since the last call, in seconds of this host's clock."""
        ends, self._step_ends = self._step_ends, []
        return self._clock.seconds(ends)

    def join_exchange(self, part: str, kind: Kind = Kind.REDUCE) -> _Exchange | None:
        """Note that this rank joins a collective; None while not tracing."""
        if not self.tracing:
            return None
        exchange = _Exchange(self._step, kind, part, self._clock.mark())
        self._exchanges.append(exchange)
        return exchange

    def leave_exchange(self, exchange: _Exchange | None) -> None:
        """Note that the collective is done on this rank."""
        if exchange is not None:
            exchange.end = self._clock.mark()

    def mark(self) -> Any:
        """Return a mark of this moment, for `add_transfer`."""
        return self._clock.mark()

    def add_transfer(self, kind: Kind, part: str, start: Any) -> None:
        """Note what this rank has done alone for an exchange since the mark `start`."""
        if self.tracing:
            end = self._clock.mark()
            self._transfers.append(_Transfer(self._step, kind, part, start, end))

    def add_exchange(self, kind: Kind, part: str, start_s: float, end_s: float) -> None:
        """Note a collective whose times are known, in seconds of this host's clock."""
        if self.tracing:
            name = task_name(self._step, kind, part)
            on = (exchange_lane(self._device),)
            span = Span(name, kind, on, start_s, max(start_s, end_s), part)
            self._sums.append((self._step, span))

    def spans(self) -> list[Span]:
        """Return the spans of the traced steps; waits for the device where marks need that."""
        transfers = self._moves()
        copies = [span for span in transfers if span.on == (compute_lane(self._device),)]
        reductions = self._reductions()
        phases = [
            span
            for phase in self._phases
            for span in self._cut(phase, reductions if phase.kind is Kind.STEP else copies)
        ]
        return phases + transfers + [span for _, span in self._sums] + reductions

    def _watch(self, layer: LayerModule) -> None:
        def entered(module: nn.Module, inputs: Any) -> None:
            if self._phase is not None and self._phase.kind is Kind.FORWARD:
                self._phase.borders.append((layer.name, self._clock.mark()))

        def ready(parameter: Tensor) -> None:
            if self._phase is not None and self._phase.kind is Kind.BACKWARD:
                self._phase.borders.append((layer.name, self._clock.mark()))

        self._hooks.append(layer.module.register_forward_pre_hook(entered))
        for _, parameter in layer.parameters:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(ready))

    def _moves(self) -> list[Span]:
        starts = self._clock.seconds([transfer.start for transfer in self._transfers])
        ends = self._clock.seconds([transfer.end for transfer in self._transfers])
        return [
            Span(
                task_name(transfer.step, transfer.kind, transfer.part, self._rank),
                transfer.kind,
                (self._lane(transfer.kind),),
                start,
                end,
                transfer.part,
            )
            for transfer, start, end in zip(self._transfers, starts, ends, strict=True)
        ]

    def _lane(self, kind: Kind) -> Resource:
        """Return the lane of a core, which copies by itself; a GPU has engines for that."""
        by_itself = isinstance(self._clock, HostClock) or kind is Kind.REDUCE
        return compute_lane(self._device) if by_itself else Resource(self._device, kind.value)

    def _cut(self, phase: _Phase, copies: Sequence[Span]) -> Iterator[Span]:
        marks = self._clock.seconds([phase.start, *(mark for _, mark in phase.borders), phase.end])
        borders = [(part, time) for (part, _), time in zip(phase.borders, marks[1:], strict=False)]
        if not self._layers:
            shares = [*between_copies(copies, marks[0], marks[-1])]
        elif phase.kind is Kind.FORWARD:
            shares = between_entries(borders, marks[0], marks[-1], self._layers)
        elif phase.kind is Kind.BACKWARD:
            shares = up_to_last(borders, marks[0], self._layers)
        else:
            shares = [("", marks[0], marks[-1])]
        on = (compute_lane(self._device),)
        for part, start, end in shares:
            name = task_name(phase.step, phase.kind, part, self._rank)
            yield Span(name, phase.kind, on, start, before(copies, start, end), part)

    def _reductions(self) -> list[Span]:
        exchanges = [exchange for exchange in self._exchanges if exchange.end is not None]
        starts = self._clock.seconds([exchange.start for exchange in exchanges])
        ends = self._clock.seconds([exchange.end for exchange in exchanges])
        on = (exchange_lane(self._device),)
        return [
            Span(
                task_name(exchange.step, exchange.kind, exchange.part),
                exchange.kind,
                on,
                started,
                max(started, end),
                exchange.part,
            )
            for exchange, start, end in zip(exchanges, starts, ends, strict=True)
            for started in (self._after_layer(exchange.step, start),)
        ]

    def _after_layer(self, step: int, start: float) -> float:
        """Return when the layer is done in whose midst a collective was joined.

        A bucket may close between two gradients of a layer, which autograd has computed together
        and hands over one by one. A plan has them ready at once, and so has the recording.
        """
        for phase in self._phases:
            if phase.step == step and phase.kind is Kind.BACKWARD:
                times = self._clock.seconds([mark for _, mark in phase.borders])
                return end_of_run([part for part, _ in phase.borders], times, start)
        return start


@contextmanager
def noted(
    recorder: Recorder | None, kind: Kind, part: str, *, alone: bool = False
) -> Iterator[None]:
    """Record what runs inside, if there is a recorder: a collective, or this rank's own work."""
    if recorder is None:
        yield
    elif alone:
        start = recorder.mark()
        yield
        recorder.add_transfer(kind, part, start)
    else:
        exchange = recorder.join_exchange(part, kind)
        yield
        recorder.leave_exchange(exchange)
