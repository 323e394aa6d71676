"""Record one rank's steps as spans with the same ids as the plan's tasks.

The recorder marks the end of every step on a clock. In a traced step, it also marks the start and
end of each phase, the first call of each layer in the forward pass, and the time when each gradient
is ready. No layer's span contains the time from the last gradient to the end of the backward pass,
because the rank then waits for the exchange. A layer that has no mark, because it was not called or
has no gradients, has a span of 0 s.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.core.cost import compute_lane, exchange_lane
from paceline.core.plan import Kind, Lane, Resource
from paceline.core.timeline import Span
from paceline.links.clock import Clock, DeviceClock
from paceline.training.models.layers import LayerModule, layers_of

# Pairs of a layer's name and the time when it starts or ends: a clock mark, or seconds.
Borders = list[tuple[str, Any]]
# Triples of a layer's name, and of the layer's start and end in seconds.
Shares = list[tuple[str, float, float]]


class LayerMarks:
    """Records a clock mark when each layer is called, and when its gradients are ready."""

    def __init__(self, layers: Sequence[LayerModule], clock: Clock) -> None:
        self.clock, self._layers = clock, layers
        self._hooks: list[RemovableHandle] = []
        self.names = tuple(layer.name for layer in layers)
        self.forward: Borders = []
        self.backward: Borders = []

    def watch(self, wanted: bool) -> None:
        """Discard all marks; install (if `wanted`) or remove the hooks that record marks."""
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
            self.forward.append((layer.name, self.clock.mark()))

        def ready(parameter: Tensor) -> None:
            self.backward.append((layer.name, self.clock.mark()))

        self._hooks.append(layer.module.register_forward_pre_hook(entered))
        for _, parameter in layer.parameters:
            self._hooks.append(_before_others(parameter, ready))

    def seconds(self) -> tuple[Borders, Borders]:
        """Return the forward marks and the backward marks, in seconds; waits for the device."""
        return in_seconds(self.forward, self.clock), in_seconds(self.backward, self.clock)


def _before_others(parameter: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Register a hook on a parameter's gradient, to run before the parameter's other hooks.

    Another hook may begin the exchange, and the operating system may suspend the thread during that
    hook. A mark made afterwards could be later than the start of the collective on another rank.
    """
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
    hooks = parameter._post_accumulate_grad_hooks
    assert hooks is not None
    for number in [number for number in hooks if number != handle.id]:
        hooks[number] = hooks.pop(number)  # torch calls hooks in the order of insertion
    return handle


def in_seconds(borders: Borders, clock: Clock) -> Borders:
    """Convert clock marks in `borders` to seconds; waits for the device."""
    times = clock.seconds([mark for _, mark in borders])
    return [(name, time) for (name, _), time in zip(borders, times, strict=True)]


class Phase(NamedTuple):
    """A forward or backward pass, from `start_s` to `end_s`.

    `computed_s`: when the computation ended, before the wait that simulates a slower device.
    `borders`: names of layers, with their marks in seconds.
    """

    kind: Kind
    start_s: float
    computed_s: float
    end_s: float
    borders: Borders


def layer_spans(
    step: int, worker: int, lane: Resource, names: Sequence[str], phases: Sequence[Phase]
) -> Iterator[Span]:
    """Yield a span for each layer in each of the given forward and backward passes.

    `names`: layers in the order of the forward pass. `lane`: resource that executes the layers.
    """
    for kind, start_s, computed_s, end_s, borders in phases:
        if computed_s > start_s:
            # Lengthen all layers by one factor, to include the wait that simulates a slower device.
            slow = (end_s - start_s) / (computed_s - start_s)
            slowed = [(part, start_s + (time_s - start_s) * slow) for part, time_s in borders]
        else:
            slowed = [(part, end_s) for part, _ in borders]
        for part, begin_s, done_s in layer_shares(kind, slowed, start_s, end_s, names):
            yield Span(kind, step, part, worker, (lane,), begin_s, done_s)


def layer_shares(
    kind: Kind, borders: Borders, start: float, end: float, layers: Sequence[str]
) -> Shares:
    """Divide a forward or backward pass among the layers; return each layer's start and end.

    In a forward pass, a layer lasts from its first call to the first call of the next layer. In a
    backward pass, it lasts from the end of the previous layer until its own last gradient is ready.
    A layer without a mark lasts 0 s: in a forward pass directly after the preceding layer in
    `layers`, in a backward pass at the end.
    """
    if kind is Kind.BACKWARD:
        last: dict[str, float] = {}
        for part, time in borders:
            last.pop(part, None)  # put the layer last: order by last gradients
            last[part] = time
        ends = list(last.values())
        end = ends[-1] if ends else start
        never = [(layer, end, end) for layer in layers if layer not in last]
        return [*zip(last, [start, *ends[:-1]], ends, strict=False), *never]
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


class Role(Enum):
    """What an activity is, such as a collective; determines how spans are made from it."""

    PHASE = "phase"
    COLLECTIVE = "collective"  # such as an all-reduce, from the time when this rank joins it
    ALONE = "alone"  # this rank's own work for an exchange, such as a copy
    PAUSE = "pause"  # part of a phase that is left out of the layers' spans
    SUB_BATCH = "sub-batch"


@dataclass(slots=True)
class Activity:
    """A period of a traced step, between the clock marks `start` and `end`.

    `part`: name of the layer or message, as in the plan. `borders`: marks of the layers in a
    forward or backward pass; empty for other activities.
    """

    role: Role
    step: int
    kind: Kind
    part: str
    start: Any
    end: Any = None
    sub_batch: int | None = None
    borders: Borders = field(default_factory=list)


class Recorder:
    """Records one rank's steps as spans between `start_trace` and `stop_trace`.

    `device`: name of the rank's device in the plan. The first traced step is step 0.
    """

    def __init__(self, clock: Clock, device: str, rank: int) -> None:
        self._device, self._rank = device, rank
        self._marks = LayerMarks((), clock)
        self._step = 0
        self._activities: list[Activity] = []
        self._sums: list[Span] = []
        self._step_ends: list[Any] = []
        self._phase: Activity | None = None
        self._kept: int | None = None
        self.tracing = False

    def start_trace(self, model: nn.Module | None = None, num_kept: int | None = None) -> None:
        """Begin to record phases, exchanges and the layers of `model`.

        `num_kept`: keep at least this number of the latest steps; None: keep all steps.
        """
        self.stop_trace()
        self._marks = LayerMarks(() if model is None else layers_of(model), self._marks.clock)
        self._marks.watch(True)
        self.tracing, self._kept, self._step = True, num_kept, 0
        self._activities, self._sums = [], []

    def stop_trace(self) -> None:
        """Stop recording, and remove all hooks; `spans` still returns what was recorded."""
        self.tracing = False
        self._marks.watch(False)

    @contextmanager
    def phase(self, kind: Kind, part: str = "") -> Iterator[None]:
        """Record the `with` block as a phase of the step, such as backward.

        A phase that has a name (`part`) is not divided into layers.
        """
        self.begin_phase(kind, part)
        yield
        self.end_phase()

    def begin_phase(self, kind: Kind, part: str = "") -> None:
        """Begin to record a phase of the step, such as backward, which lasts until `end_phase`."""
        if self.tracing:
            self._marks.watch(not part)
            self._phase = self.begin(kind, part, Role.PHASE)

    def end_phase(self) -> None:
        """Record the end of the current phase, if any."""
        phase, self._phase = self._phase, None
        self.end(phase)
        # Ignore calls of layers in backward, where activation checkpointing calls layers again.
        if phase is not None and phase.kind is Kind.FORWARD:
            phase.borders = self._marks.forward
        elif phase is not None and phase.kind is Kind.BACKWARD:
            phase.borders = self._marks.backward

    @property
    def idle(self) -> bool:
        """Whether the recorder is tracing, and is not in a phase."""
        return self.tracing and self._phase is None

    def end_step(self) -> None:
        """Count a step, and record its end."""
        self._step += 1
        self._step_ends.append(self._marks.clock.mark())
        # Not in every step: visiting all activities is slow.
        if self._kept is not None and self._step % self._kept == 0:
            first = self._step - self._kept
            self._step_ends = self._step_ends[-self._kept :]
            self._activities = [one for one in self._activities if one.step >= first]
            self._sums = [span for span in self._sums if span.step >= first]

    def step_ends(self) -> list[float]:
        """Return and forget the recorded ends of steps, in seconds of this host's clock."""
        ends, self._step_ends = self._step_ends, []
        return self._marks.clock.seconds(ends)

    def begin(
        self,
        kind: Kind,
        part: str = "",
        role: Role = Role.COLLECTIVE,
        sub_batch: int | None = None,
    ) -> Activity | None:
        """Begin to record an activity, and return it to pass to `end`; None if not tracing."""
        if not self.tracing:
            return None
        start = self._marks.clock.mark()
        activity = Activity(role, self._step, kind, part, start, None, sub_batch)
        # Other threads may append at the same time; list.append is atomic, so no lock is needed.
        self._activities.append(activity)
        return activity

    def end(self, activity: Activity | None) -> None:
        """Record the end of an activity that `begin` returned; ignores None."""
        if activity is not None:
            activity.end = self._marks.clock.mark()

    def add_exchange(
        self, kind: Kind, part: str, start_s: float, end_s: float, sub_batch: int | None = None
    ) -> None:
        """Record a past collective, from `start_s` to `end_s` in seconds of this host's clock."""
        if self.tracing:
            on, end_s = (exchange_lane(self._device),), max(start_s, end_s)
            span = Span(kind, self._step, part, None, on, start_s, end_s, sub_batch)
            self._sums.append(span)

    def spans(self) -> list[Span]:
        """Return all spans of the traced steps; waits for the device."""
        by_role = self._timed()
        phases, on = by_role[Role.PHASE], (compute_lane(self._device),)
        backward = {one.step: one for one in reversed(phases) if one.kind is Kind.BACKWARD}
        moves = [self._span(one, (self._lane(one.kind),)) for one in by_role[Role.ALONE]]
        reductions = [self._collective(one, backward) for one in by_role[Role.COLLECTIVE]]
        copies = [span for span in moves if span.on == on]
        pauses = [(one.start, one.end) for one in by_role[Role.PAUSE]]
        computed = []
        for phase in phases:
            beside = reductions if phase.kind is Kind.STEP else copies
            inside = [c for c in beside if phase.start <= c.start_s and c.end_s <= phase.end]
            between = [*pauses, *((copy.start_s, copy.end_s) for copy in inside)]
            for part, start, end in self._shares(phase, inside):
                within = [one for one in between if start <= one[0] and one[1] <= end]
                # Exclude copies and pauses. In backward they come first in a layer's time, because
                # hooks of the previous layer make the copies; in other phases they come last.
                if phase.kind is Kind.BACKWARD:
                    start = max((last for _, last in within), default=start)
                else:
                    end = min((first for first, _ in within), default=end)
                computed.append(Span(phase.kind, phase.step, part, self._rank, on, start, end))
        parts = [self._span(one, on) for one in by_role[Role.SUB_BATCH]]
        return computed + moves + self._sums + reductions + parts

    def _span(self, one: Activity, on: tuple[Resource, ...]) -> Span:
        worker, number = self._rank, one.sub_batch
        return Span(one.kind, one.step, one.part, worker, on, one.start, one.end, number)

    def _collective(self, one: Activity, backward: Mapping[int, Activity]) -> Span:
        """Return a collective's span; its start is corrected by the backward pass of its step."""
        start, on = one.start, (exchange_lane(self._device),)
        if one.step in backward:
            start = _end_of_layer(backward[one.step].borders, start)
        return Span(one.kind, one.step, one.part, None, on, start, max(start, one.end))

    def _timed(self) -> dict[Role, list[Activity]]:
        """Return the finished activities by role, with times in seconds; waits for the device."""
        known, clock = [one for one in self._activities if one.end is not None], self._marks.clock
        starts = clock.seconds([one.start for one in known])
        ends = clock.seconds([one.end for one in known])
        by_role: dict[Role, list[Activity]] = {role: [] for role in Role}
        for one, start, end in zip(known, starts, ends, strict=True):
            borders = in_seconds(one.borders, clock)
            by_role[one.role].append(replace(one, start=start, end=end, borders=borders))
        return by_role

    def _lane(self, kind: Kind) -> Resource:
        # A CPU worker copies and adds in its computing thread. A GPU copies with copy engines, and
        # adds with kernels.
        by_itself = not isinstance(self._marks.clock, DeviceClock) or kind is Kind.REDUCE
        return compute_lane(self._device) if by_itself else Resource(self._device, Lane(kind.value))

    def _shares(self, phase: Activity, copies: Sequence[Span]) -> Shares:
        """Divide a phase into layers or, without recorded layers, into the times between copies.

        The time before a copy gets the copy's name; the time after the last copy gets the name "".
        """
        start, names = phase.start, self._marks.names
        if names and not phase.part and phase.kind in (Kind.FORWARD, Kind.BACKWARD):
            return layer_shares(phase.kind, phase.borders, start, phase.end, names)
        if names or phase.part:
            return [(phase.part, start, phase.end)]
        shares = []
        for copy in sorted(copies, key=lambda span: span.start_s):
            if copy.start_s >= start:  # copies may overlap
                shares.append((copy.part, start, copy.start_s))
                start = copy.end_s
        return [*shares, ("", start, phase.end)]


def _end_of_layer(borders: Borders, moment: float) -> float:
    """Move `moment` to a layer's last gradient if it lies between the layer's gradients.

    Autograd may compute a layer's gradients together but return them one after the other, so a
    collective may start before the last gradient is returned. In a plan, however, all gradients of
    a layer are ready at the same time.
    """
    last = bisect_right(borders, moment, key=lambda border: border[1])
    while 0 < last < len(borders) and borders[last][0] == borders[last - 1][0]:
        moment, last = borders[last][1], last + 1
    return moment


@contextmanager
def noted(
    recorder: Recorder | None,
    kind: Kind,
    part: str = "",
    role: Role = Role.COLLECTIVE,
    sub_batch: int | None = None,
) -> Iterator[None]:
    """Record the `with` block as an activity; if `recorder` is None, record nothing."""
    activity = None if recorder is None else recorder.begin(kind, part, role, sub_batch)
    yield
    if recorder is not None:
        recorder.end(activity)
