"""Records one rank's steps as spans under the names that plans give their tasks.

Every step leaves one mark at its end. A traced step leaves marks at the borders of its phases, at
the first entry of each layer in forward, and when each layer's gradients are ready in backward.
The time between the last gradient and the end of backward is no layer's: it is spent waiting for
the exchange. A layer that leaves no mark (never entered, or without gradients) has an empty share,
where `describe` has it.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.core.cost import compute_lane, exchange_lane
from paceline.core.plan import Kind, task_name
from paceline.core.timeline import Span
from paceline.models.layers import LayerModule, layers_of
from paceline.record.clock import Clock


@dataclass
class _Phase:
    """Part of a traced step; `borders` pairs layers with where their share begins or ends."""

    step: int
    kind: Kind
    start: Any
    end: Any = None
    borders: list[tuple[str, Any]] = field(default_factory=list)


@dataclass
class _Exchange:
    """A collective: from when this rank joined it until it was done here."""

    step: int
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
        self._step_ends: list[Any] = []
        self._phase: _Phase | None = None

    @property
    def tracing(self) -> bool:
        """Whether spans are being recorded."""
        return bool(self._hooks)

    def start_trace(self, model: nn.Module) -> None:
        """Record the spans of the following steps of `model`, until `stop_trace`."""
        self._step = 0
        self._phases, self._exchanges = [], []
        layers = layers_of(model)
        self._layers = [layer.name for layer in layers]
        for layer in layers:
            self._watch(layer)

    def stop_trace(self) -> None:
        """Remove all hooks; the spans stay."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @contextmanager
    def phase(self, kind: Kind) -> Iterator[None]:
        """Record what runs inside as a part of this step."""
        if not self.tracing:
            yield
            return
        self._phase = _Phase(self._step, kind, self._clock.mark())
        yield
        self._phase.end = self._clock.mark()
        self._phases.append(self._phase)
        self._phase = None

    def end_step(self) -> None:
        """Count the step, and note when it ended."""
        self._step += 1
        self._step_ends.append(self._clock.mark())

    def step_ends(self) -> list[float]:
        """Return when the steps ended since the last call, in seconds of this host's clock."""
        ends, self._step_ends = self._step_ends, []
        return self._clock.seconds(ends)

    def join_exchange(self, part: str) -> _Exchange | None:
        """Note that this rank joins a collective; None while not tracing."""
        if not self.tracing:
            return None
        exchange = _Exchange(self._step, part, self._clock.mark())
        self._exchanges.append(exchange)
        return exchange

    def leave_exchange(self, exchange: _Exchange | None) -> None:
        """Note that the collective is done on this rank."""
        if exchange is not None:
            exchange.end = self._clock.mark()

    def spans(self) -> list[Span]:
        """Return the spans of the traced steps; waits for the device where marks need that."""
        return [span for phase in self._phases for span in self._cut(phase)] + self._reductions()

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

    def _cut(self, phase: _Phase) -> Iterator[Span]:
        marks = self._clock.seconds([phase.start, *(mark for _, mark in phase.borders), phase.end])
        borders = [(part, time) for (part, _), time in zip(phase.borders, marks[1:], strict=False)]
        if phase.kind is Kind.FORWARD:
            shares = _between_entries(borders, marks[0], marks[-1], self._layers)
        elif phase.kind is Kind.BACKWARD:
            shares = _up_to_last(borders, marks[0], self._layers)
        else:
            shares = [("", marks[0], marks[-1])]
        on = (compute_lane(self._device),)
        for part, start, end in shares:
            name = task_name(phase.step, phase.kind, part, self._rank)
            yield Span(name, phase.kind, on, start, end, part)

    def _reductions(self) -> list[Span]:
        exchanges = [exchange for exchange in self._exchanges if exchange.end is not None]
        starts = self._clock.seconds([exchange.start for exchange in exchanges])
        ends = self._clock.seconds([exchange.end for exchange in exchanges])
        on = (exchange_lane(self._device),)
        return [
            Span(
                task_name(exchange.step, Kind.REDUCE, exchange.part),
                Kind.REDUCE,
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
                return _end_of_run([part for part, _ in phase.borders], times, start)
        return start


def _end_of_run(parts: Sequence[str], times: Sequence[float], moment: float) -> float:
    """Return the time of the last mark that follows the moment without another part's between."""
    last = bisect_right(times, moment)
    while 0 < last < len(parts) and parts[last] == parts[last - 1]:
        moment, last = times[last], last + 1
    return moment


def _between_entries(
    borders: Sequence[tuple[str, float]], start: float, end: float, layers: Sequence[str]
) -> list[tuple[str, float, float]]:
    """Give each layer the time from its first entry to the first entry of the next.

    One that is never entered follows the one registered before it.
    """
    first: dict[str, float] = {} if borders else {layers[0]: start}
    for part, time in borders:
        first.setdefault(part, time)
    starts = [start, *list(first.values())[1:]]
    shares = list(zip(first, starts, [*starts[1:], end], strict=False))
    for i, layer in enumerate(layers):
        if layer not in first:
            parts = [part for part, _, _ in shares]
            at = parts.index(layers[i - 1]) + 1 if i else 0
            time = shares[at - 1][2] if at else start
            shares.insert(at, (layer, time, time))
    return shares


def _up_to_last(
    borders: Sequence[tuple[str, float]], start: float, layers: Sequence[str]
) -> list[tuple[str, float, float]]:
    """Give each layer the time until the last of its gradients is ready, the others nothing."""
    last: dict[str, float] = {}
    for part, time in borders:
        last.pop(part, None)
        last[part] = time
    ends = list(last.values())
    end = ends[-1] if ends else start
    never = [(layer, end, end) for layer in layers if layer not in last]
    return [*zip(last, [start, *ends[:-1]], ends, strict=False), *never]
