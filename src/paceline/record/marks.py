"""The layers of a traced batch: their borders, and the spans under the names that plans have."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.core.plan import Kind, Resource, task_name
from paceline.core.timeline import Span
from paceline.models.layers import LayerModule
from paceline.record.clock import Clock
from paceline.record.shares import between_entries, up_to_last

Borders = list[tuple[str, Any]]


class LayerMarks:
    """Takes a mark where a layer is entered, and where its gradients are ready."""

    def __init__(self, layers: Sequence[LayerModule], clock: Clock) -> None:
        self._clock = clock
        self._layers = layers
        self._hooks: list[RemovableHandle] = []
        self.names = tuple(layer.name for layer in layers)
        self.forward: Borders = []
        self.backward: Borders = []

    def watch(self, wanted: bool) -> None:
        """Begin a batch of which marks are wanted, or not."""
        self.forward, self.backward = [], []
        if wanted and not self._hooks:
            for layer in self._layers:
                self._hook(layer)
        elif not wanted and self._hooks:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []

    def _hook(self, layer: LayerModule) -> None:
        def entered(module: nn.Module, inputs: Any) -> None:
            self.forward.append((layer.name, self._clock.mark()))

        def ready(parameter: Tensor) -> None:
            self.backward.append((layer.name, self._clock.mark()))

        self._hooks.append(layer.module.register_forward_pre_hook(entered))
        for _, parameter in layer.parameters:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(ready))

    def seconds(self) -> tuple[Borders, Borders]:
        """Return the borders with their times in seconds; waits for the device."""
        return self._timed(self.forward), self._timed(self.backward)

    def _timed(self, borders: Borders) -> Borders:
        times = self._clock.seconds([mark for _, mark in borders])
        return [(name, time) for (name, _), time in zip(borders, times, strict=True)]


class Phase(NamedTuple):
    """Forward or backward: its end by the arithmetic, and after the wait of a slower device."""

    kind: Kind
    start_s: float
    computed_s: float
    end_s: float
    borders: Sequence[tuple[str, float]]

    def slowed(self, time_s: float) -> float:
        """Return when a moment of the arithmetic would be on the slower device."""
        real = self.computed_s - self.start_s
        if real <= 0:
            return self.end_s
        return self.start_s + (time_s - self.start_s) * (self.end_s - self.start_s) / real


def layer_spans(
    step: int, worker: int, lane: Resource, names: Sequence[str], phases: Sequence[Phase]
) -> Iterator[Span]:
    """Yield the spans of the layers in forward and in backward."""
    for phase in phases:
        borders = [(part, phase.slowed(time)) for part, time in phase.borders]
        if phase.kind is Kind.FORWARD:
            shares = between_entries(borders, phase.start_s, phase.end_s, names)
        else:
            shares = up_to_last(borders, phase.start_s, names)
        for part, start_s, end_s in shares:
            name = task_name(step, phase.kind, part, worker)
            yield Span(name, phase.kind, (lane,), start_s, end_s, part)
