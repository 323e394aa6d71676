"""Rehearse strategy wheel: real processes and a real network, but layers that take a given time.

This process is the hub, whose head and updates are paced, too. It starts the bodies of this
machine, or waits for those of others; all of them learn from it that the run is a rehearsal.
"""

import os
import time
from dataclasses import replace
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import fmean, quantiles
from uuid import uuid4

import torch
from torch import nn

from paceline.core.cost import Rate, Roofline, compute_lane
from paceline.core.errors import InvalidInput, WorkerLost
from paceline.core.pace import LayerTimes, Totals, layer_times
from paceline.core.timeline import Timeline
from paceline.core.workload import Workload
from paceline.data import load
from paceline.machine_file import KnownDevice, find_device
from paceline.models.paced import PacedSGD
from paceline.models.workload import workload_of
from paceline.planner import Forecast
from paceline.record.trace import write_trace
from paceline.report import write_report
from paceline.report.format import duration, nbytes, number, share
from paceline.runs import make_folder
from paceline.strategies.wheel.order import LOOPBACK, Fitted, Run
from paceline.strategies.wheel.outcome import Outcome
from paceline.strategies.wheel.pace import NUM_CLASSES, pace_of
from paceline.strategies.wheel.run import train
from paceline.strategies.wheel.split import split
from paceline.tables import console
from paceline.training.this_machine import facts
from paceline.wheel_live import Live
from paceline.wheel_result import WheelRehearsal
from paceline.wheel_run import predict, served
from paceline.wheel_settings import WheelRehearseSettings
from paceline.wire.keys import load_hub

_MOST_PER_CORE = 4
_NUM_WARM_UP, _NUM_LAST = 2, 1  # steps; the turns of the last one have no forward


def rehearse_wheel(
    settings: WheelRehearseSettings, *, as_json: bool = False, quiet: bool = False
) -> tuple[WheelRehearsal, Path]:
    """Rehearse, and return the result and the folder that it was written to.

    The result goes to standard output, `as_json` or as text, unless `quiet`; progress goes to
    standard error. Raises InvalidInput if model, head, device and codecs do not fit each other, and
    WorkerLost if no worker is left.
    """
    out, err = console(quiet=quiet), console(stderr=True)

    def say(text: str) -> None:
        err.print(text, soft_wrap=True)

    known = find_device(settings.device)
    run = build(settings, known)
    name = f"{settings.model.replace(':', '.')}-rehearsed-{uuid4().hex[:4]}"
    folder = make_folder(settings, f"{time.strftime('%Y%m%d-%H%M%S')}-{name}")
    if settings.bind is None:
        run = replace(run, run_id=folder.name)
    say(
        f"{settings.model}: {run.workload.num_parameters:,} parameters in "
        f"{len(run.workload.layers)} layers; {settings.workers} workers, {run.config.lanes} a "
        f"device, {_devices(known)}"
    )
    found: list[Forecast | None] = []

    def begun(fitted: Fitted | None) -> None:
        found.append(predict(run, fitted))
        if found[0] is not None:
            say(f"predicted {duration(found[0].step_s)} a step: {found[0].why}")

    def prepared(address: str, pids: dict[int, tuple[int, ...]]) -> None:
        if settings.bind is not None:
            say(f"listening on {address}; waiting for {settings.workers} workers")

    with Live(err, len(run.data.train), "rehearsing") as live:
        outcome = train(replace(run, begun=begun, prepared=prepared, look=live.look, say=say))
    result = _result_of(settings, folder.name, _devices(known), outcome, found[0])
    planned = [found[0].timeline] if found[0] is not None else []
    timelines = [*planned, Timeline(outcome.traced.spans, "rehearsed")]
    write_trace(folder / "trace.json", timelines)
    (folder / "result.json").write_text(result.model_dump_json(indent=2) + "\n")
    write_report(folder)
    if as_json:
        out.print_json(result.model_dump_json())
    else:
        out.print(_summary(result, folder), soft_wrap=True)
    return result, folder


def build(settings: WheelRehearseSettings, known: KnownDevice) -> Run:
    """Describe the model, and give its layers the device's times.

    InvalidInput if there is no such model, or no head worth splitting off.
    """
    config = settings.config()
    size = ceil(settings.batch_size / settings.workers)
    workload = workload_of(settings.model, size, settings.input_shape)
    rate = Roofline.of(known.machine).rates[compute_lane(known.device.name)]
    times, is_gpu = _times(settings, workload, rate), known.device.kind == "gpu"
    pace = pace_of(split(workload, config), times, rate, is_gpu, settings.input_shape)
    steps = _NUM_WARM_UP + settings.steps + _NUM_LAST
    samples = f"synthetic:1,classes={NUM_CLASSES},samples={steps * settings.batch_size}"
    return Run(
        model_name=settings.model,
        num_classes=None,
        data_name=samples,
        input_shape=None,
        model=nn.Module(),  # every process makes its own stand-in
        workload=workload,
        data=load(samples),
        config=config,
        make=lambda parameters: PacedSGD(parameters, pace.update_s),
        batch_size=settings.batch_size,
        epochs=1,
        seed=0,
        devices=_places(ceil(config.workers / config.lanes)) if settings.bind is None else None,
        address=settings.bind or LOOPBACK,
        run_id=settings.run,
        keys=None if settings.keys is None else load_hub(settings.keys),
        profile_s=settings.profile_s,
        deadline_s=settings.deadline_s,
        wait_s=settings.wait_s,
        pace=pace,
    )


def _devices(known: KnownDevice) -> str:
    return f"paced as {known.label}"


def _times(settings: WheelRehearseSettings, workload: Workload, rate: Rate) -> LayerTimes:
    usual = layer_times(workload, rate)
    given = (settings.forward_ms, settings.backward_ms, settings.update_ms)
    otherwise = (sum(usual.forward_s), sum(usual.backward_s), usual.update_s)
    phases = zip(given, otherwise, strict=True)
    totals = Totals(*(seconds if ms is None else ms / 1e3 for ms, seconds in phases))
    return layer_times(workload, rate, totals)


def _places(num_bodies: int) -> tuple[str, ...]:
    """Return where the bodies' stand-ins are: on the CPU, which sleeps most of the time."""
    cores = len(os.sched_getaffinity(0))
    if num_bodies + 1 > _MOST_PER_CORE * cores:
        raise InvalidInput(
            f"workers: {num_bodies} processes and the hub do not fit on {cores} cores; "
            f"at most {_MOST_PER_CORE} can share one"
        )
    return ("cpu",) * num_bodies


def step_seconds(outcome: Outcome, workers: int) -> list[float]:
    """Return how long each step took, in which every worker makes an update.

    Without those in which the lanes get into step, and the turns at the end without a forward.
    WorkerLost if too few are left, as workers were lost.
    """
    ends = outcome.tally.update_ends_s
    ends = ends[_NUM_WARM_UP * workers - 1 : len(ends) - _NUM_LAST * workers]
    seconds = [end - start for start, end in pairwise(ends[::workers])]
    if len(seconds) < 2:
        lost = "; ".join(outcome.tally.lost)
        raise WorkerLost(f"too few steps were rehearsed: {lost or 'workers ended early'}")
    return seconds


def _result_of(
    settings: WheelRehearseSettings,
    run_id: str,
    devices: str,
    outcome: Outcome,
    planned: Forecast | None,
) -> WheelRehearsal:
    seconds = step_seconds(outcome, settings.workers)
    step_s = fmean(seconds)
    lower_s, _, upper_s = quantiles(seconds, n=4, method="inclusive")
    return WheelRehearsal(
        id=run_id,
        settings=settings,
        machine=facts(torch.device("cpu")),
        devices=devices,
        samples_per_s=settings.batch_size / step_s,
        rehearsed_step_s=step_s,
        lower_quartile_s=lower_s,
        upper_quartile_s=upper_s,
        **served(outcome, planned),
    )


def _summary(result: WheelRehearsal, folder: Path) -> str:
    """Return what a rehearsal showed, in a few lines."""
    settings, error = result.settings, result.prediction_error
    rehearsed = f"rehearsed {duration(result.rehearsed_step_s)}"
    if error is not None and result.predicted_step_s is not None:
        rehearsed = f"predicted {duration(result.predicted_step_s)}, {rehearsed} ({error:+.1%})"
    travelled = sum(row.nbytes for row in result.purposes if row.travels) / result.updates
    idle = ", ".join(f"{name} {share(part)}" for name, part in result.idle_shares.items())
    faults = len(result.faults)
    conforms = f"departs from it in {faults} places" if faults else "conforms to it"
    lines = (
        f"rehearsed  no training: {settings.workers} workers {result.devices}",
        f"step       {rehearsed}",
        f"quartiles  {duration(result.lower_quartile_s)} and {duration(result.upper_quartile_s)}",
        f"throughput {number(result.samples_per_s)} samples/s rehearsed with strategy wheel",
        f"travelled  {nbytes(travelled)} an update, without headers",
        *([f"idle       {idle}"] if idle else []),
        f"plan       the trace {conforms}",
        f"written    {folder}/result.json, trace.json, report.html",
    )
    return "\n".join(lines)
