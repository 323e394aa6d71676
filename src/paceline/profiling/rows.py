"""The findings of all ranks as the rows of a result."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from statistics import fmean, median, quantiles
from typing import Any

from paceline.core.breakdown import Breakdown, breakdown
from paceline.core.plan import Kind
from paceline.core.timeline import Span, Timeline, intersection, length, union
from paceline.links.group import Group
from paceline.profile_result import (
    LayerRow,
    OperatorRow,
    OverheadRow,
    ProfileResult,
    ResourceRow,
    Spread,
    StageRow,
    WorkerMemoryRow,
)
from paceline.profile_settings import ProfileSettings
from paceline.profiling.here import Findings
from paceline.profiling.steps import typical
from paceline.training.this_machine import facts

_MOST_OPERATORS = 20


def result_of(
    settings: ProfileSettings, run_id: str, found: Findings, group: Group
) -> ProfileResult:
    """Bring together what all ranks have found. All ranks must call it together."""
    blocks = found.blocks
    plain = list(chain.from_iterable(blocks.plain))
    recorded = list(chain.from_iterable(blocks.recorded))
    stages = _mean([breakdown(timeline) for timeline in blocks.timelines])
    held = [WorkerMemoryRow(**row) for row in group.gather(found.held.model_dump())]
    phases = _by_phase(blocks.spans)
    samples = len(found.subject.data.train) / len(found.subject.batches)
    return ProfileResult(
        id=run_id,
        settings=settings,
        machine=facts(group.device),
        step=spread(plain),
        recorded_step=spread(recorded),
        cost=median(recorded) / median(plain) - 1,
        recorded_typical_s=fmean(group.gather(fmean(map(typical, blocks.recorded)))),
        stages=_stages(stages),
        forward=spread(phases[Kind.FORWARD]),
        backward=spread(phases[Kind.BACKWARD]),
        update=spread(phases[Kind.STEP]),
        layers=tuple(_layers(found)),
        resources=(*_resources(blocks.timelines), *_processors(blocks.processor_s, plain, group)),
        overheads=(*_waits(stages), *found.alone.between, *found.together.calls),
        operators=_operators(found.together.operators, found.by_operator),
        agreement=found.alone.agreement,
        memory=found.memory,
        workers=tuple(held),
        largest=None,
        samples_per_s=samples / median(plain),
        insights=(),
        peak_memory_bytes=tuple(row.training_nbytes for row in held),
    )


def spread(values: Sequence[float]) -> Spread:
    """Return the median and the quartiles; of nothing, zeros."""
    if len(values) < 2:
        only = values[0] if values else 0.0
        return Spread(median_s=only, lower_s=only, upper_s=only)
    low, _, high = quantiles(values, n=4, method="inclusive")
    return Spread(median_s=median(values), lower_s=low, upper_s=high)


def _mean(parts: Sequence[Breakdown]) -> Breakdown:
    names = [field.name for field in fields(Breakdown)]
    return Breakdown(**{name: fmean(getattr(part, name) for part in parts) for name in names})


def _stages(parts: Breakdown) -> tuple[StageRow, ...]:
    return tuple(
        StageRow(stage=field.name.removesuffix("_s"), seconds=getattr(parts, field.name))
        for field in fields(Breakdown)
    )


def _waits(parts: Breakdown) -> Iterator[OverheadRow]:
    """Yield what the step of the recorded timeline waited for."""
    step_s = parts.compute_s + parts.exposed_s + parts.idle_s
    for what, seconds in (
        ("waiting for the exchange", parts.exposed_s),
        ("neither computing nor exchanging", parts.idle_s),
    ):
        yield OverheadRow(what=what, seconds=seconds, share=seconds / step_s)


def _settled(blocks: Sequence[Sequence[Span]]) -> Iterator[list[Span]]:
    """Yield each block's spans without those of its first step, which has still to settle."""
    for spans in blocks:
        yield [span for span in spans if not span.name.startswith("s0/")]


def _by_phase(blocks: Sequence[Sequence[Span]]) -> dict[Kind, list[float]]:
    """Return for each kind its seconds in each step."""
    phases: dict[Kind, list[float]] = defaultdict(list)
    for spans in _settled(blocks):
        steps: dict[tuple[Kind, str], float] = defaultdict(float)
        for span in spans:
            steps[span.kind, span.name.partition("/")[0]] += span.duration_s
        for (kind, _), seconds in steps.items():
            phases[kind].append(seconds)
    return phases


def _layers(found: Findings) -> Iterator[LayerRow]:
    """Yield the layers in forward order."""
    seconds: dict[tuple[Kind, str], list[float]] = defaultdict(list)
    for span in chain.from_iterable(_settled(found.blocks.spans)):
        seconds[span.kind, span.part].append(span.duration_s)
    for layer in found.subject.workload.layers:
        yield LayerRow(
            name=layer.name,
            forward=spread(seconds[Kind.FORWARD, layer.name]),
            backward=spread(seconds[Kind.BACKWARD, layer.name]),
            num_parameters=layer.num_parameters,
            kept_nbytes=layer.kept_nbytes or 0,
        )


def _resources(timelines: Sequence[Timeline]) -> tuple[ResourceRow, ...]:
    """Return how long each lane of each worker's device was busy in a step, on average."""
    seen: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for timeline in timelines:
        for resource, track in timeline.tracks.items():
            steps = timeline.steps_of(resource.owner)
            busy = length(intersection(union(track), steps))
            seen[str(resource)].append((busy / len(steps), length(steps) / len(steps)))
    rows = {name: [fmean(column) for column in zip(*of, strict=True)] for name, of in seen.items()}
    return tuple(
        ResourceRow(resource=name, busy_s=busy, idle_s=max(0.0, step - busy))
        for name, (busy, step) in sorted(rows.items())
    )


def _processors(own_s: float, plain: Sequence[float], group: Group) -> Iterator[ResourceRow]:
    """Yield what a step took of the cores of each worker's host process, on average by core."""
    rows: list[Any] = group.gather([own_s, fmean(plain)])
    for worker, (busy, step) in enumerate(rows):
        name = f"processor cores of worker {worker}"
        yield ResourceRow(resource=name, busy_s=busy, idle_s=max(0.0, step - busy))


def _operators(rows: Sequence[OperatorRow], nbytes: Mapping[str, int]) -> tuple[OperatorRow, ...]:
    """Return the operators that take longest, with the memory that they took."""
    return tuple(
        row.model_copy(update={"nbytes": nbytes.get(row.name, 0)}) for row in rows[:_MOST_OPERATORS]
    )
