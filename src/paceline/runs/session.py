"""Run a request in one process, for any strategy: from the profile to the result files.

profile -> forecast -> print the forecasts -> train or rehearse -> write and print the result
"""

import logging
import shlex
from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from safetensors import SafetensorError

from paceline.checkpoints.folder import CheckpointFolder
from paceline.core.compare import compare
from paceline.core.cost import PacedDevice, Roofline, Totals, compute_lane
from paceline.core.errors import InvalidInput, first_line
from paceline.core.outcome import Outcome
from paceline.core.settings import RehearseSettings, TrainSettings
from paceline.core.timeline import Timeline
from paceline.exchange.checkpoints import CHECKPOINTS, State, read_state
from paceline.exchange.replicas import ReplicaRunner, devices_of
from paceline.exchange.session import ElasticWorker, Runner, TrainingSession
from paceline.links.cores import all_cores
from paceline.links.files import written_whole
from paceline.links.group import Group
from paceline.measure.this_machine import facts
from paceline.planner import Forecast, Ranking
from paceline.records.machine_file import find_device
from paceline.records.result import PlanRow, RunResult
from paceline.records.settings import AUTO, configuration, strategy_of
from paceline.report import advice, metrics
from paceline.report.plans import Form, in_terminal
from paceline.report.run import result_tables
from paceline.report.terminal import console
from paceline.runs.folder import make_folder, run_folder, show_plan, write_files
from paceline.runs.forecasts import (
    Found,
    alone_or_together,
    forecast_with,
    forecasts_of,
    may_be_alone,
    ranking_of,
    train_best,
)
from paceline.runs.progress import TerminalProgress
from paceline.runs.restarts import RunRequest, restarted_by_torchrun
from paceline.strategies import EXCHANGES

_OF_RANK_0 = {"output", "tensorboard"}  # settings that only rank 0 uses
logger = logging.getLogger(__name__)


def go_through(request: RunRequest, group: Group, elastic: ElasticWorker | None = None) -> None:
    """Run a request in this process, as one rank of `group`.

    If training on rank 0 alone is faster, rank 0 trains alone and the other ranks return.
    `elastic`: set if this process is an elastic worker, which may join and leave at any time.
    """
    request = restarted_by_torchrun(_agreed(request, group), group)
    reason = _carried_out(request, group, elastic)
    if reason is None or group.rank != 0:
        return
    logger.warning("%s", reason)
    alone = request.settings.model_copy(update={"workers": 1, "balance": None})
    with all_cores():
        own = Group.alone(group.device, group.deadline_s)
        _carried_out(request.model_copy(update={"settings": alone}), own, None, [reason])


def _carried_out(
    request: RunRequest,
    group: Group,
    elastic: ElasticWorker | None,
    decisions: Sequence[str] = (),
) -> str | None:
    """Run a request, and return None; or return why rank 0 alone would be faster.

    In the second case nothing is trained. `decisions`: choices made before this call, which the
    result lists, too.
    """
    # Only rank 0, or the first elastic worker, prints.
    silent = group.rank != 0 or (elastic is not None and elastic.number != 0)
    settings = request.settings
    out, err = console(quiet=silent or request.quiet), console(stderr=True, quiet=silent)
    title = f"Predicted from a profile, {settings.batch_size} samples a step"
    with ExitStack() as stack:
        progress = stack.enter_context(closing(_progress(request, group, err)))
        session = replace(_session(request, group, progress), elastic=elastic)
        runner: Runner = stack.enter_context(session.strategy.runner().start(session))
        about = runner.about
        # Create the folder first: a wrong --output must fail before hours of training.
        makes = session.writes_files and request.verb != "plan"
        made = run_folder(settings.output, request.run_id, session.settings)
        folder = stack.enter_context(made) if makes else None
        logger.info("%s", about)
        progress.samples_per_step = runner.samples_per_step
        with progress.measuring(settings.profile_s):
            forecasts = forecasts_of(session, runner)
        _doubt(forecasts, group)
        if request.verb == "plan":
            ranking = ranking_of(session, runner, forecasts)
            _show_ranking(request, session, ranking, out, title)
            return None
        _announce(group, quiet=request.quiet)
        decides = may_be_alone(settings)
        found = alone_or_together(session, runner, forecasts) if decides else Found()
        if found.why_alone is not None:
            return found.why_alone  # the folder, which contains only the settings, is removed
        if not session.is_rehearsal:
            _show_forecasts(forecasts, title, err if request.as_json else out)
        used, outcome = _trained(session, runner, forecasts, found.slow)
        lost, decisions = (*request.lost, *outcome.lost), (*decisions, *outcome.decisions)
        outcome = outcome.model_copy(update={"lost": lost, "decisions": decisions})
        result, timelines = _result(session, forecasts, used, outcome)
        _save(session, runner, folder, result, timelines)
        if folder is not None:
            _show_result(result, folder, out, as_json=request.as_json)
    return None


def _show_forecasts(forecasts: Sequence[Forecast], title: str, screen: Console) -> None:
    """Print the forecasts as a table."""
    for table in in_terminal(list(map(PlanRow.of, forecasts)), title, None):
        screen.print(table)


def _show_result(result: RunResult, folder: Path, out: Console, *, as_json: bool) -> None:
    """Print a result as tables or JSON."""
    if as_json:
        out.print_json(result.model_dump_json())
        return
    for shown in result_tables(result, str(folder)):
        out.print(shown, soft_wrap=isinstance(shown, str))  # only tables are wrapped by rich


def _announce(group: Group, *, quiet: bool) -> None:
    """Print, on each machine except worker 0's, that worker 0 shows progress and results."""
    places = [one.place for one in group.members]
    if group.rank and places.index(places[group.rank]) == group.rank:
        text = f"worker {group.rank} of {group.world_size}: worker 0 shows the progress"
        console(stderr=True, quiet=quiet).print(f"{text} and writes the results")


def _save(
    session: TrainingSession,
    runner: Runner,
    folder: Path | None,
    result: RunResult,
    timelines: Sequence[Timeline],
) -> None:
    """Save the model, and write the result files; all ranks must call this together.

    Only the rank with a `folder` writes files, and raises InvalidInput if this fails, for example
    because the disk is full.
    """
    try:
        if not session.is_rehearsal:
            # With strategy subbatch, the other ranks send their shards of the model to rank 0.
            file = None if folder is None else written_whole(folder / "model.safetensors")
            with file or nullcontext(Path()) as path:
                runner.save(path)
        if folder is not None:
            write_files(folder, result, timelines)
    except (OSError, SafetensorError) as error:
        if folder is None:
            raise
        has_checkpoint = bool(CheckpointFolder(folder / CHECKPOINTS).steps)
        on = f", then run paceline train --resume {folder}" if has_checkpoint else ""
        problem = f"cannot write the results to {folder}: {first_line(error)}"
        raise InvalidInput("output", problem, hint=f"free some space{on}") from error


def _show_ranking(
    request: RunRequest, session: TrainingSession, ranking: Ranking, out: Console, title: str
) -> None:
    """Print the plans for this machine, and save them if requested."""
    settings = request.settings
    form: Form = "json" if request.as_json else "markdown" if request.as_markdown else "text"
    is_kept = request.keep and session.group.rank == 0
    show_plan(
        out,
        ranking,
        settings.output if is_kept else None,
        title,
        form=form,
        explain=request.explain,
        is_measured=True,
        id=request.run_id,
        model=settings.model,
        machine="this machine",
        batch_size=settings.batch_size,
        facts=facts(session.group.device),
    )
    if form == "text" and not session.strategy.is_led:
        launch = "torchrun --nnodes 2 --nproc-per-node 1 --node-rank RANK --master-addr ADDRESS"
        command = f"{launch} -m paceline train {shlex.quote(settings.model)}"
        out.print(f"two machines: on each `{command}`", soft_wrap=True)


def _doubt(forecasts: Sequence[Forecast], group: Group) -> None:
    """Warn on rank 0 if the profiled step times show that other programs used the machine."""
    unrest = max((one.machine.usual_losses.unrest for one in forecasts), default=0.0)
    for warning in advice.of_unrest(unrest, "steps of the profile") if group.rank == 0 else ():
        logger.warning("%s", warning)


def _agreed(request: RunRequest, group: Group) -> RunRequest:
    """Return the request with rank 0's run id; under torchrun each rank has generated one.

    Raises InvalidInput if the settings of a rank differ from those of rank 0.
    """
    own = request.settings.model_dump(mode="json", exclude=_OF_RANK_0)
    rows = group.gather({"run_id": request.run_id, "settings": own})
    first = rows[0]["settings"]
    for rank, row in enumerate(rows):
        for name, value in row["settings"].items():
            if value != first.get(name):
                problem = f"is {value!r} in worker {rank}, but {first.get(name)!r} in worker 0"
                hint = "start all workers with the same command"
                raise InvalidInput(name, problem, hint=hint)
    return request.model_copy(update={"run_id": rows[0]["run_id"]})


def _progress(request: RunRequest, group: Group, err: Console) -> TerminalProgress:
    settings = request.settings
    if isinstance(settings, RehearseSettings):
        return TerminalProgress(err, "rehearsing")
    scalars = None
    if settings.tensorboard is not None and group.rank == 0 and request.verb == "train":
        at = settings.tensorboard
        scalars = make_folder(at, request.run_id, "tensorboard")
    num_epochs = settings.epochs if settings.steps is None else None
    return TerminalProgress(err, "training", num_epochs, scalars)


def _session(request: RunRequest, group: Group, progress: TerminalProgress) -> TrainingSession:
    settings, resumed = request.settings, None
    if isinstance(settings, TrainSettings) and request.verb == "train":
        resumed = read_state(settings, group)
        settings = as_learned(settings, resumed)
    if settings.strategy == AUTO:  # start with any exchange; forecasts decide later
        strategy = next(iter(EXCHANGES.values()))
        config = strategy.config(workers=group.world_size)
    else:
        strategy, config = strategy_of(settings), configuration(settings)
    # A plan profiles each strategy twice, so each profile gets half of `profile_s`.
    if request.verb == "plan" and not strategy.is_led:
        settings = settings.model_copy(update={"profile_s": settings.profile_s / 2})
    device = paced_device(settings) if isinstance(settings, RehearseSettings) else None
    return TrainingSession(
        settings, strategy, config, request.run_id, group, progress, device, resumed
    )


def as_learned(settings: TrainSettings, resumed: State | None) -> TrainSettings:
    """Return the settings with the strategy and chunk size that the resumed run found fastest."""
    if resumed is None or "progress" not in resumed.parts:
        return settings
    progress, options = resumed.parts["progress"], dict(settings.options)
    name = progress["strategy"] if settings.strategy == AUTO else settings.strategy
    if progress.get("chunk") is not None and name == progress["strategy"]:
        options.setdefault("chunk", progress["chunk"])
    return settings.model_copy(update={"strategy": name, "options": options})


def paced_device(settings: RehearseSettings) -> PacedDevice | None:
    """Return the device that a rehearsal emulates; None if layers are only slowed down."""
    if settings.device is None:
        return None
    known = find_device(settings.device)
    phases_ms = (settings.forward_ms, settings.backward_ms, settings.update_ms)
    totals = Totals(*(None if ms is None else ms / 1e3 for ms in phases_ms))
    rate = Roofline.of(known.machine).rates[compute_lane(known.device.name)]
    return PacedDevice(known.label, rate, known.device.kind, totals)


def _trained(
    session: TrainingSession, runner: Runner, forecasts: Sequence[Forecast], slow: Sequence[str]
) -> tuple[Forecast | None, Outcome]:
    """Train or rehearse; return the forecast of the strategy used, if any, and the outcome."""
    settings = session.settings
    name = forecasts[0].strategy if settings.strategy == AUTO else session.strategy.name
    chosen = next((one for one in forecasts if one.strategy == name), None)
    if not isinstance(runner, ReplicaRunner):
        return chosen, runner.train(chosen.config if chosen else session.config)
    assert chosen is not None  # every strategy with a ReplicaRunner has a forecast
    if settings.strategy == AUTO:
        return train_best(session, runner, forecasts, slow)
    outcome = runner.train(chosen.config)
    if outcome.config != chosen.config:  # a chunk search changed the configuration
        chosen = forecast_with(session, runner, session.strategy, outcome.config)
    return chosen, outcome


def _result(
    session: TrainingSession,
    forecasts: Sequence[Forecast],
    forecast: Forecast | None,
    outcome: Outcome,
) -> tuple[RunResult, list[Timeline]]:
    """Build the result of a run, and list its predicted and its measured timeline."""
    predicted = outcome.predicted or (forecast.timeline if forecast else None)
    comparison = None
    # A comparison needs two traced steps, but a resumed run may have fewer left.
    has_steps = outcome.timeline.num_steps() > 1
    if predicted is not None and has_steps and not session.strategy.is_led:
        comparison = compare(predicted, outcome.timeline)
    if outcome.predicted_step_s is None and forecast is not None:
        outcome = outcome.model_copy(update={"predicted_step_s": forecast.step_s})
    places = {one.place for one in session.group.members}
    machine = facts(session.group.device) | {"hosts": len(places)}
    if outcome.device is not None:
        machine["device"] = outcome.device
    # A chunk search may have ended with a configuration that was not forecast before.
    plans = forecasts if forecast is None or forecast in forecasts else [forecast]
    result = RunResult.of(
        outcome,
        origin=session.origin,
        id=session.run_id,
        settings=session.settings,
        strategy=forecast.strategy if forecast else session.strategy.name,
        devices=devices_of(session),
        machine=machine,
        plans=tuple(map(PlanRow.of, plans)),
        comparison=comparison,
    )
    found = advice.findings(metrics.of_run(result, outcome.timeline))
    result = result.model_copy(update={"findings": found})
    return result, [one for one in (predicted, outcome.timeline) if one is not None]
