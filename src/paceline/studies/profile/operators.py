"""Time training steps with torch.profiler: the operators, and the host's work between them.

On a CPU, an operator's time is its self time. On a GPU, it is the time of the operator's kernels,
and the host's time counts as overhead. The kernels' total time, without idle time, is also
reported. Paceline's own spans include idle time, because they end when the next layer begins.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.autograd import DeviceType  # type: ignore[attr-defined] # exists, but is not declared
from torch.profiler import ProfilerActivity, profile, record_function

from paceline.core.plan import Kind
from paceline.core.timeline import Span
from paceline.links.devices import device_of
from paceline.record.recorder import Recorder
from paceline.records.profile import AgreementRow, OperatorRow, OverheadRow

_PREFIX = "paceline: "
_PHASES = (Kind.LOAD, Kind.FORWARD, Kind.BACKWARD, Kind.STEP)
_NUM_STEPS = 3
_STEP_US = 1e-6 / _NUM_STEPS  # factor from the total microseconds of all steps to seconds per step
_MOST_CALLS = 8  # maximum number of rows in `ThroughTorch.calls`
_CALLS = ("cuda", "c10d::", "gloo:", "nccl:")
# Profiler ranges that are not operators: the beginning of a range's name, and its label.
_BETWEEN = {
    _PREFIX: "Python and dispatch between operators",
    "autograd::engine": "autograd's own bookkeeping",
    "Optimizer.": "the optimizer's own Python",
}

Step = Callable[[Recorder], object]


class Annotating(Recorder):
    """A recorder that also marks the phases of a step for torch.profiler."""

    _range: record_function | None = None

    def begin_phase(self, kind: Kind, part: str = "") -> None:
        """Begin a phase for Paceline's recorder and for torch.profiler."""
        self._range = record_function(f"{_PREFIX}{kind}")
        self._range.__enter__()
        super().begin_phase(kind, part)

    def end_phase(self) -> None:
        """End the phase for Paceline's recorder and for torch.profiler."""
        super().end_phase()
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None


@dataclass(frozen=True)
class ThroughTorch:
    """The times per step that torch.profiler measured on one rank.

    `kernels_s`: total seconds of a GPU's kernels; None on a CPU. `agreement`: each phase's
    time by Paceline and its time by torch.profiler; empty on a GPU. `between`: host time between
    operators, including waits for other ranks. `calls`: host time in calls of CUDA, c10d, Gloo and
    NCCL. `operators`: self time of each operator.
    """

    kernels_s: float | None
    agreement: tuple[AgreementRow, ...]
    between: tuple[OverheadRow, ...]
    calls: tuple[OverheadRow, ...]
    operators: tuple[OperatorRow, ...]


def through_torch(step: Step, recorder: Annotating, model: nn.Module) -> ThroughTorch:
    """Time steps with torch.profiler, while Paceline's recorder records the same steps.

    An unrecorded warm-up step comes first.
    """
    own = device_of(next(model.parameters()).device)
    activities = [ProfilerActivity.CPU, *own.profiled]
    with profile(activities=activities):
        step(recorder)  # discard this profile: the first profiled step is slow
    recorder.start_trace(model)
    with profile(activities=activities) as found:
        for _ in range(_NUM_STEPS):
            step(recorder)
        own.synchronize()
    recorder.stop_trace()
    return _of_averages(found.key_averages(), recorder.spans())


def _of_averages(averages: Sequence[Any], spans: Sequence[Span]) -> ThroughTorch:
    """Build the result from torch.profiler's averages and Paceline's spans of the same steps."""
    on_cpu = [one for one in averages if one.device_type == DeviceType.CPU]
    kernels = [one for one in averages if one.device_type != DeviceType.CPU]
    kernels = [one for one in kernels if not one.key.startswith(tuple(_BETWEEN))]
    operators = [one for one in on_cpu if not one.key.startswith((*_BETWEEN, *_CALLS))]
    ranges = {one.key: one for one in on_cpu if one.key.startswith(_PREFIX)}
    step_s = sum(one.cpu_time_total for one in ranges.values()) * _STEP_US

    def overhead(what: str, rows: Sequence[Any], calls: float | None = None) -> OverheadRow:
        seconds = float(sum(row.self_cpu_time_total for row in rows)) * _STEP_US
        return OverheadRow(what=what, seconds=seconds, share=seconds / step_s, calls=calls)

    between = [
        overhead(what, [row for row in on_cpu if row.key.startswith(prefix)])
        for prefix, what in _BETWEEN.items()
    ]
    calls = [row for row in on_cpu if row.key.startswith(_CALLS) and row.self_cpu_time_total > 0]
    calls.sort(key=lambda row: -row.self_cpu_time_total)
    if kernels:
        between.insert(0, overhead("operators on the host, which launch kernels", operators))
    kernels_s = sum(row.self_device_time_total for row in kernels) * _STEP_US
    return ThroughTorch(
        kernels_s if kernels else None,
        () if kernels else tuple(_agreement(ranges, spans)),
        tuple(between),
        tuple(overhead(row.key, [row], row.count / _NUM_STEPS) for row in calls[:_MOST_CALLS]),
        _operator_rows(kernels or operators),
    )


def _agreement(ranges: Mapping[str, Any], spans: Sequence[Span]) -> Iterator[AgreementRow]:
    """Yield each phase's duration as measured by Paceline and as measured by torch.profiler."""
    ours_s: dict[Kind, float] = defaultdict(float)
    for span in spans:
        ours_s[span.kind] += span.duration_s / _NUM_STEPS
    for kind in _PHASES:
        found = ranges.get(f"{_PREFIX}{kind}")
        whole = 0.0 if found is None else found.cpu_time_total * _STEP_US
        own = 0.0 if found is None else found.self_cpu_time_total * _STEP_US
        yield AgreementRow(
            phase=kind.value, ours_s=ours_s[kind], torch_s=whole, in_operators_s=whole - own
        )


def _operator_rows(rows: Sequence[Any]) -> tuple[OperatorRow, ...]:
    """Return the operators (on a GPU: kernels) that have self time, the longest first."""
    on_gpu = any(row.device_type != DeviceType.CPU for row in rows)
    field = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    total = sum(getattr(row, field) for row in rows) or 1.0
    return tuple(
        OperatorRow(
            name=row.key,
            calls=row.count / _NUM_STEPS,
            seconds=getattr(row, field) * _STEP_US,
            share=getattr(row, field) / total,
            nbytes=0,
        )
        for row in sorted(rows, key=lambda row: -getattr(row, field))
        if getattr(row, field) > 0
    )
