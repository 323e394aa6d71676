"""Profile on all ranks in parallel, write the result's files, and print a summary.

`profile_model` starts a process for each rank, which runs `main`. Only rank 0 prints and writes.
"""

import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

from paceline.core.compare import Breakdown, breakdown
from paceline.core.errors import InvalidInput
from paceline.core.plan import Kind
from paceline.core.timeline import Span, intersection, length, quartiles, union
from paceline.links.files import write_text
from paceline.links.group import Group
from paceline.links.launch import launch
from paceline.links.processes import module_command
from paceline.links.rendezvous import check_gpus
from paceline.measure.this_machine import facts
from paceline.records import profile
from paceline.records.result import read_result
from paceline.report import advice, metrics, write_report
from paceline.report.profile import summary, tables
from paceline.report.terminal import console
from paceline.runs.folder import new_id, run_folder, write_files
from paceline.runs.launching import check_cores, under_torchrun
from paceline.runs.rank import as_rank, leave
from paceline.studies.profile import profiled_steps
from paceline.studies.profile.largest_batch import find_largest

_MOST_OPERATORS = 20
_SILENT = "99"  # log level that silences kineto's message at the start of each profile


def profile_model(settings: profile.ProfileSettings, *, as_json: bool = False) -> None:
    """Profile a model; write result.json, trace.json and report.html, and print the result."""
    if under_torchrun():
        raise InvalidInput("paceline profile", "starts its workers itself; run it without torchrun")
    check_cores(settings.workers)
    check_gpus(settings.workers)
    module, run_id = "paceline.studies.profile.profile_ranks", new_id(settings.model)
    command = module_command(module, settings.model_dump_json(), run_id)
    os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
    launch(command, settings.workers)
    folder = settings.output / run_id
    result = read_result(folder)
    assert isinstance(result, profile.ProfileResult), "the workers write a profile"
    if settings.largest_batch:  # search last, because users may interrupt a long search
        largest = find_largest(settings, console(stderr=True).print)
        result = result.model_copy(update={"largest": largest})
        write_text(folder / "result.json", result.model_dump_json(indent=2) + "\n")
        write_report(folder)
    out = console()
    if as_json:
        out.print_json(result.model_dump_json())
        return
    for table in tables(result):
        out.print(table)
    out.print(summary(result, str(folder)), soft_wrap=True)


def _profile_rank(settings: profile.ProfileSettings, run_id: str, group: Group) -> None:
    err = console(stderr=True, quiet=group.rank != 0)
    subject = profiled_steps.subject_of(settings, group)
    made: AbstractContextManager[Path | None] = nullcontext()
    if group.rank == 0:  # Make the folder before the steps, to report an unwritable folder early.
        made = run_folder(settings.output, run_id, settings)
    with made as folder:
        workload = subject.workload
        err.print(
            f"{settings.model}: {workload.num_parameters:,} parameters in {len(workload.layers)} "
            f"layers; {settings.steps} plain steps and {settings.steps} recorded steps"
        )
        findings = profiled_steps.profile_rank(settings, subject, group)
        result = result_of(settings, run_id, findings, group)
        if folder is not None:
            write_files(folder, result, findings.blocks.timelines[-1:])


def result_of(
    settings: profile.ProfileSettings, run_id: str, found: profiled_steps.Findings, group: Group
) -> profile.ProfileResult:
    """Build the result from the measurements of all ranks; all ranks must call this together."""
    blocks = found.blocks
    plain, recorded = (list(chain.from_iterable(one)) for one in (blocks.plain, blocks.recorded))
    held = [profile.WorkerMemoryRow(**row) for row in group.gather(found.held.model_dump())]
    samples = len(found.subject.recipe.samples) / len(found.subject.batches)
    result = profile.ProfileResult(
        id=run_id,
        settings=settings,
        machine=facts(group.device),
        step=spread(plain),
        recorded_step=spread(recorded),
        cost=median(recorded) / median(plain) - 1,
        unrest=blocks.unrest,
        recorded_typical_s=fmean(group.gather(fmean(map(profiled_steps.typical, blocks.recorded)))),
        **_stages(found),
        layers=tuple(_layers(found)),
        resources=tuple(_resources(blocks, group)),
        operators=tuple(
            row.model_copy(update={"nbytes": found.by_operator.get(row.name, 0)})
            for row in found.together.operators[:_MOST_OPERATORS]
        ),
        agreement=found.alone.agreement,
        kernels_s=found.alone.kernels_s,
        memory=found.memory,
        workers=tuple(held),
        largest=None,
        samples_per_s=samples / median(plain),
        findings=(),
        peak_memory_bytes=tuple(row.training_nbytes for row in held),
    )
    found_by_rules = advice.findings(metrics.of_profile(result))
    return result.model_copy(update={"findings": found_by_rules})


def _stages(found: profiled_steps.Findings) -> dict[str, Any]:
    """Return these fields of a `ProfileResult`: stages, forward, backward, update, overheads."""
    columns = zip(*(vars(breakdown(one)).values() for one in found.blocks.timelines), strict=True)
    mean = Breakdown(*map(fmean, columns))
    waits = (
        profile.OverheadRow(what=what, seconds=seconds, share=seconds / mean.step_s)
        for what, seconds in (
            ("waiting for the exchange", mean.exposed_s),
            ("neither computing nor exchanging", mean.idle_s),
        )
    )
    phases = _by_phase(found.blocks.spans)
    return {
        "stages": tuple(
            profile.StageRow(stage=name, seconds=s) for name, s in mean.seconds.items()
        ),
        "forward": spread(phases[Kind.FORWARD]),
        "backward": spread(phases[Kind.BACKWARD]),
        "update": spread(phases[Kind.STEP]),
        "overheads": (*waits, *found.alone.between, *found.together.calls),
    }


def spread(values: Sequence[float]) -> profile.Quartiles:
    """Return the median and quartiles of `values`, or zeros if there are no values."""
    lower, middle, upper = quartiles(values or [0.0])
    return profile.Quartiles(median_s=middle, lower_s=lower, upper_s=upper)


def _by_phase(blocks: Sequence[Sequence[Span]]) -> dict[Kind, list[float]]:
    """Return the seconds of each phase (such as forward) in each step.

    `blocks`: the spans of each block; a block is a series of consecutive steps.
    """
    phases: dict[Kind, list[float]] = defaultdict(list)
    for spans in blocks:
        steps: dict[tuple[Kind, int], float] = defaultdict(float)
        for span in spans:
            if span.step:  # leave out step 0 of a block, which is not typical
                steps[span.kind, span.step] += span.duration_s
        for (kind, _), seconds in steps.items():
            phases[kind].append(seconds)
    return phases


def _layers(found: profiled_steps.Findings) -> Iterator[profile.LayerRow]:
    seconds: dict[tuple[Kind, str], list[float]] = defaultdict(list)
    for span in chain.from_iterable(found.blocks.spans):
        if span.step:  # leave out step 0 of a block, which is not typical
            seconds[span.kind, span.part].append(span.duration_s)
    for layer in found.subject.workload.layers:
        yield profile.LayerRow(
            name=layer.name,
            forward=spread(seconds[Kind.FORWARD, layer.name]),
            backward=spread(seconds[Kind.BACKWARD, layer.name]),
            num_parameters=layer.num_parameters,
            kept_nbytes=layer.kept_nbytes or 0,
        )


def _resources(blocks: profiled_steps.Blocks, group: Group) -> Iterator[profile.ResourceRow]:
    """Yield each resource's busy and idle seconds per step; workers' cores are resources, too."""
    seen: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for timeline in blocks.timelines:
        for resource, track in timeline.tracks.items():
            steps = timeline.steps_of(resource.owner)
            busy = length(intersection(union(track), steps))
            seen[str(resource)].append((busy / len(steps), length(steps) / len(steps)))
    rows = {name: [fmean(column) for column in zip(*of, strict=True)] for name, of in seen.items()}
    # Gather from each worker: its processor time in a step, per core, and the step's duration.
    own: list[Any] = group.gather([blocks.processor_s, fmean(chain.from_iterable(blocks.plain))])
    cores = [(f"processor cores of worker {worker}", row) for worker, row in enumerate(own)]
    for name, (busy, step) in (*sorted(rows.items()), *cores):
        yield profile.ResourceRow(resource=name, busy_s=busy, idle_s=max(0.0, step - busy))


def main() -> None:
    """Run one rank; the process's arguments are the settings as JSON and the run's id."""
    settings = profile.ProfileSettings.model_validate_json(sys.argv[1])
    leave(as_rank(partial(_profile_rank, settings, sys.argv[2]), settings.deadline_s))
