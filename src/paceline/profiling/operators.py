"""What torch.profiler sees of the same steps: operators by name, what is between them, and totals.

On a CPU an operator's time is that of its call, without the operators that it calls. On a GPU it is
its kernel's, and what the host does is overhead; backward runs in a thread of its own there, so
that only the whole step is compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType  # type: ignore[attr-defined] # there, but not declared
from torch.profiler import ProfilerActivity, profile, record_function

from paceline.core.plan import COMPUTE, Kind
from paceline.core.timeline import Span
from paceline.profile_result import AgreementRow, OperatorRow, OverheadRow
from paceline.record.recorder import Recorder

_PREFIX = "paceline: "
_PHASES = (Kind.LOAD, Kind.FORWARD, Kind.BACKWARD, Kind.STEP)
_US = 1e-6
_MOST_CALLS = 8  # kinds of calls of the driver or of the exchange that are shown
_CALLS = ("cuda", "c10d::", "gloo:", "nccl:")
# What is no operator, and how its own time is called.
_BETWEEN = {
    _PREFIX: "Python and dispatch between operators",
    "autograd::engine": "autograd's own bookkeeping",
    "Optimizer.": "the optimizer's own Python",
}

Step = Callable[[Recorder], object]


class Annotating(Recorder):
    """A recorder that tells torch.profiler, too, where the phases of a step are."""

    _range: record_function | None = None

    def begin_phase(self, kind: Kind) -> None:
        """Begin the phase for both."""
        self._range = record_function(f"{_PREFIX}{kind}")
        self._range.__enter__()
        super().begin_phase(kind)

    def end_phase(self) -> None:
        """End it for both."""
        super().end_phase()
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None


@dataclass(frozen=True)
class ThroughTorch:
    """What torch.profiler found, per step: `between` operators, and `calls` of driver or exchange.

    With other ranks, what is between operators holds waiting for them.
    """

    agreement: tuple[AgreementRow, ...]
    between: tuple[OverheadRow, ...]
    calls: tuple[OverheadRow, ...]
    operators: tuple[OperatorRow, ...]


def through_torch(
    step: Step, recorder: Annotating, model: nn.Module, device: torch.device, num_steps: int
) -> ThroughTorch:
    """Take steps under our recorder and torch.profiler at once, after one for each to begin."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities):
        step(recorder)  # torch.profiler's first step takes long
    recorder.start_trace(model)
    with profile(activities=activities) as found:
        for _ in range(num_steps):
            step(recorder)
        if on_gpu:
            torch.cuda.synchronize(device)
    recorder.stop_trace()
    return _of_averages(found.key_averages(), recorder.spans(), num_steps)


def _of_averages(averages: Sequence[Any], spans: Sequence[Span], num_steps: int) -> ThroughTorch:
    """Return what torch.profiler's averages by name say, beside our spans of the same steps."""
    on_cpu = [one for one in averages if one.device_type == DeviceType.CPU]
    kernels = [one for one in averages if one.device_type != DeviceType.CPU]
    kernels = [one for one in kernels if not one.key.startswith(tuple(_BETWEEN))]
    operators = [one for one in on_cpu if not one.key.startswith((*_BETWEEN, *_CALLS))]
    ranges = {one.key: one for one in on_cpu if one.key.startswith(_PREFIX)}
    step_s = sum(one.cpu_time_total for one in ranges.values()) * _US / num_steps
    between = _between(on_cpu, step_s, num_steps)
    if kernels:
        seconds = _own_s(operators) / num_steps
        what = "the host's side of operators"
        between.insert(0, OverheadRow(what=what, seconds=seconds, share=seconds / step_s))
        agreement = [_whole(kernels, spans, num_steps)]
    else:
        agreement = [_phase(kind, ranges, spans, num_steps) for kind in _PHASES]
    return ThroughTorch(
        tuple(agreement),
        tuple(between),
        tuple(_calls(on_cpu, step_s, num_steps)),
        _operator_rows(kernels or operators, num_steps),
    )


def _own_s(rows: Sequence[Any]) -> float:
    return float(sum(row.self_cpu_time_total for row in rows)) * _US


def _between(rows: Sequence[Any], step_s: float, num_steps: int) -> list[OverheadRow]:
    found = []
    for prefix, what in _BETWEEN.items():
        own = [row for row in rows if row.key.startswith(prefix)]
        seconds = _own_s(own) / num_steps
        found.append(OverheadRow(what=what, seconds=seconds, share=seconds / step_s))
    return found


def _calls(rows: Sequence[Any], step_s: float, num_steps: int) -> list[OverheadRow]:
    """Return the calls of the driver and of the exchange that took longest on the host."""
    calls = [row for row in rows if row.key.startswith(_CALLS) and row.self_cpu_time_total > 0]
    calls.sort(key=lambda row: -row.self_cpu_time_total)
    return [
        OverheadRow(
            what=row.key,
            seconds=_own_s([row]) / num_steps,
            share=_own_s([row]) / num_steps / step_s,
            calls=row.count / num_steps,
        )
        for row in calls[:_MOST_CALLS]
    ]


def _phase(
    kind: Kind, ranges: dict[str, Any], spans: Sequence[Span], num_steps: int
) -> AgreementRow:
    found = ranges.get(f"{_PREFIX}{kind}")
    whole = 0.0 if found is None else found.cpu_time_total * _US / num_steps
    own = 0.0 if found is None else found.self_cpu_time_total * _US / num_steps
    return AgreementRow(
        phase=kind.value,
        ours_s=_spans_s(spans, [kind]) / num_steps,
        torch_s=whole,
        in_operators_s=whole - own,
    )


def _whole(kernels: Sequence[Any], spans: Sequence[Span], num_steps: int) -> AgreementRow:
    seconds = sum(row.self_device_time_total for row in kernels) * _US / num_steps
    ours = _spans_s(spans, list(COMPUTE)) / num_steps
    return AgreementRow(phase="kernels", ours_s=ours, torch_s=seconds, in_operators_s=seconds)


def _spans_s(spans: Sequence[Span], kinds: Sequence[Kind]) -> float:
    return sum(span.duration_s for span in spans if span.kind in kinds)


def _operator_rows(rows: Sequence[Any], num_steps: int) -> tuple[OperatorRow, ...]:
    """Return the operators by their own time, longest first; those without any are left out."""
    on_gpu = any(row.device_type != DeviceType.CPU for row in rows)
    own = {
        row.key: (row.self_device_time_total if on_gpu else row.self_cpu_time_total, row.count)
        for row in rows
    }
    total = sum(microseconds for microseconds, _ in own.values()) or 1.0
    by_time = sorted(own.items(), key=lambda item: -item[1][0])
    return tuple(
        OperatorRow(
            name=name,
            calls=count / num_steps,
            seconds=microseconds * _US / num_steps,
            share=microseconds / total,
            nbytes=0,
        )
        for name, (microseconds, count) in by_time
        if microseconds > 0
    )
