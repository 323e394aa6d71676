"""What each rank does in a run: build, describe, profile, plan; train, and write it down."""

import resource
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_model
from torch import nn

from paceline.core.compare import compare, conform
from paceline.core.errors import InvalidInput
from paceline.core.strategy import Window
from paceline.core.timeline import Timeline
from paceline.core.workload import Workload
from paceline.data import BalancedSampler, Dataset, ShardedBatches, loader
from paceline.exchange.checked import Candidate, Checked
from paceline.links.group import Group
from paceline.models import describe
from paceline.planner import ERROR_BAR, Forecast, chunk_seconds, forecast, rank
from paceline.planner.admission import admit_profiled, refused
from paceline.record.clock import clock_for
from paceline.record.merge import gather_timeline
from paceline.record.recorder import Recorder
from paceline.record.trace import write_trace
from paceline.report import write_report
from paceline.result import ComparisonTable, EpochRow, PlanRow, RehearsalResult, Result
from paceline.settings import AUTO, RunSettings, TrainSettings, UnevenSettings
from paceline.strategies import EXCHANGES, STRATEGIES, find_exchange, probers
from paceline.training.fitted import fitted
from paceline.training.loop import Epoch, Job, Outcome, num_untraced, share_batches, train
from paceline.training.objective import objective_of
from paceline.training.profile import Profile, profile
from paceline.training.step import SGD, Share, shares
from paceline.training.this_machine import facts
from paceline.wheel_settings import WheelRehearseSettings, WheelSettings

_TOLERANCE = 2 * ERROR_BAR
SLACK_S = 1e-3  # hooks of one gradient run one after another, and each takes its mark


@dataclass(frozen=True)
class Setup:
    """A model and its data on one rank; `workload` describes the rank's part of a step."""

    settings: TrainSettings
    group: Group
    model: nn.Module
    data: Dataset
    batches: ShardedBatches | BalancedSampler
    workload: Workload

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self.settings.epochs * len(self.batches)

    @property
    def samples_per_step(self) -> float:
        """Samples of a step over all workers, on average over an epoch."""
        return len(self.data.train) / len(self.batches)

    @property
    def score(self) -> str:
        """What the share of right test samples is called."""
        return objective_of(self.data).name

    @property
    def sgd(self) -> SGD:
        """The optimizer's settings."""
        return SGD(self.settings.learning_rate, self.settings.momentum)

    def source(self) -> Iterator[Share]:
        """Yield this rank's part of each step of an epoch."""
        return shares(self.batches, loader(self.data.train, self.batches), self.group.device)

    def job(
        self, recorder: Recorder, report: Callable[[Epoch], None], advance: Callable[[], None]
    ) -> Job:
        """Return the training of this rank, and draw its random numbers anew.

        A profile has drawn some before it; and ranks must not drop out the same units.
        """
        torch.manual_seed(self.settings.seed + self.group.rank)
        return Job(
            model=self.model,
            data=self.data,
            batches=self.batches,
            epochs=self.settings.epochs,
            sgd=self.sgd,
            group=self.group,
            recorder=recorder,
            report=report,
            advance=advance,
        )


def build(settings: TrainSettings, group: Group) -> Setup:
    """Load the data, build the model for it, and describe it. InvalidInput if they do not fit."""
    if group.world_size != settings.workers:
        raise InvalidInput(f"workers: {settings.workers} asked for, {group.world_size} started")
    settings.config()
    model, data, *_ = fitted(settings.model, settings.data, settings.seed)
    batches = share_batches(
        data, settings.batch_size, settings.seed, group, settings.balance is not None
    )
    size = -(-settings.batch_size // settings.workers)
    inputs = torch.zeros(size, *data.sample_shape)
    workload = describe(model, inputs, settings.model)
    return Setup(settings, group, model.to(group.device), data, batches, workload)


def profile_here(setup: Setup) -> Profile:
    """Measure the model and the link on this machine, on all ranks together."""
    settings, group = setup.settings, setup.group
    return profile(
        setup.model,
        setup.workload,
        setup.source,
        setup.sgd.optimizer,
        group,
        settings.profile_s,
        probers(_configs(setup), group),
    )


def _configs(setup: Setup) -> dict[str, Any]:
    """Return each strategy's configuration: as it was asked for, or else as it comes."""
    return {
        name: setup.settings.config()
        if name == setup.settings.strategy
        else strategy.config(workers=setup.group.world_size)
        for name, strategy in EXCHANGES.items()
    }


def plan_here(setup: Setup, measured: Profile) -> list[Forecast]:
    """Return what each strategy would take with these workers, best first."""
    forecasts = []
    for name, config in _configs(setup).items():
        strategy = EXCHANGES[name]
        machine, cost = measured.calibrated(strategy, config)
        if name == "host" and "chunk" not in setup.settings.options:
            sizes = chunk_seconds(setup.workload, machine, strategy, config, cost)
            config = replace(config, chunk=min(sizes, key=sizes.__getitem__))
        forecasts.append(
            forecast(setup.workload, machine, strategy, config, setup.samples_per_step, cost)
        )
    return rank(forecasts)


def check_admission(setup: Setup, measured: Profile, forecasts: Sequence[Forecast]) -> None:
    """Refuse workers that do not help in balanced batches: InvalidInput, on all ranks, says why."""
    name, batch_size = setup.settings.strategy, setup.settings.batch_size
    chosen = forecasts[0] if name == AUTO else _forecast_of(name, forecasts)
    own = admit_profiled(chosen, measured.durations, setup.workload.batch_size, batch_size)
    reasons = setup.group.gather([verdict.why for verdict in refused(own)])[0]
    if reasons:
        raise InvalidInput(f"{'; '.join(reasons)} (--force has all take part)")


class Trained(NamedTuple):
    """A rank's outcome, the timeline of all ranks, and the plan that was carried out.

    `decisions` are what was said of it on the way, where the strategy was to be chosen.
    """

    outcome: Outcome
    timeline: Timeline
    chosen: Forecast
    decisions: tuple[str, ...]


def train_here(
    setup: Setup,
    forecasts: Sequence[Forecast],
    report: Callable[[Epoch], None],
    advance: Callable[[], None],
    say: Callable[[str], None],
) -> Trained:
    """Train on all ranks as the settings say or, with strategy "auto", as the forecasts do.

    `say` is told of every change of mind.
    """
    settings, group = setup.settings, setup.group
    device = forecasts[0].devices[group.rank]
    job = setup.job(Recorder(clock_for(group.device), device, group.rank), report, advance)
    if settings.strategy == AUTO:
        name, outcome, decisions = _choose(job, forecasts, say)
    else:
        name, decisions = settings.strategy, []
        config = _forecast_of(name, forecasts).config
        outcome = import_module(find_exchange(name).run).train(job, config)
    timeline = gather_timeline(outcome.spans, outcome.offset, group)
    return Trained(outcome, timeline, _forecast_of(name, forecasts), tuple(decisions))


def _forecast_of(name: str, forecasts: Sequence[Forecast]) -> Forecast:
    return next(forecast for forecast in forecasts if forecast.strategy == name)


def _choose(
    job: Job, forecasts: Sequence[Forecast], say: Callable[[str], None]
) -> tuple[str, Outcome, list[str]]:
    """Train as predicted to be fastest, or else as measured; return the name of that, and why."""
    decisions: list[str] = []

    def decide(why: str) -> None:
        decisions.append(why)
        say(why)

    # Profiles differ between ranks, and all have to go the same way: rank 0's.
    predicted = job.group.gather([(one.strategy, one.step_s) for one in forecasts])[0]
    candidates = [
        _candidate(job, _forecast_of(strategy, forecasts), step_s) for strategy, step_s in predicted
    ]
    shown = [f"{one.name} {one.predicted_s * 1e3:.3g} ms" for one in candidates]
    decide(f"auto: {candidates[0].name} first; predicted {', '.join(shown)} a step")
    checked = Checked(
        candidates,
        job.group,
        _TOLERANCE,
        num_untraced(len(job.batches), job.epochs) + (job.epochs > 1) * len(job.batches),
        decide,
    )
    outcome = train(job, checked)
    steady = outcome.step_seconds[checked.num_searched :] or outcome.step_seconds[-1:]
    return checked.name, replace(outcome, step_seconds=steady), decisions


def _candidate(job: Job, forecast: Forecast, predicted_s: float) -> Candidate:
    run = import_module(find_exchange(forecast.strategy).run)
    make = partial(run.replica, job.model, forecast.config, job.group)
    return Candidate(forecast.strategy, predicted_s, make)


def result_of(setup: Setup, run_id: str, forecasts: Sequence[Forecast], trained: Trained) -> Result:
    """Bring together what all ranks have to say of a run. All ranks must call it together."""
    settings, group = setup.settings, setup.group
    outcome, measured, chosen, decisions = trained
    plan = STRATEGIES[chosen.strategy].plan(
        setup.workload, chosen.machine, chosen.config, Window(measured.num_steps())
    )
    measured_step_s = median(outcome.step_seconds)
    slack_s = SLACK_S + 2 * max(group.gather(outcome.offset.error_s))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Result(
        id=run_id,
        settings=settings,
        strategy=chosen.strategy,
        decisions=decisions,
        machine=facts(group.device),
        plans=tuple(PlanRow.of(forecast) for forecast in forecasts),
        epochs=tuple(EpochRow(**asdict(epoch)) for epoch in outcome.epochs),
        accuracy=outcome.epochs[-1].accuracy,
        score=setup.score,
        predicted_step_s=chosen.step_s,
        measured_step_s=measured_step_s,
        samples_per_s=setup.samples_per_step / measured_step_s,
        comparison=ComparisonTable.of(compare(chosen.timeline, measured)),
        faults=tuple(conform(plan, measured, slack_s)),
        peak_memory_bytes=tuple(group.gather(peak)),
        shares=setup.batches.shares if isinstance(setup.batches, BalancedSampler) else None,
    )


def make_folder(
    settings: RunSettings | UnevenSettings | WheelSettings | WheelRehearseSettings, run_id: str
) -> Path:
    """Make the run's folder and return it; InvalidInput if that cannot be."""
    folder = settings.output / run_id
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise InvalidInput(f"output: cannot make {folder}: {error.strerror}") from None
    return folder


def save_here(setup: Setup, folder: Path | None) -> None:
    """Write model.safetensors into the folder, on the rank that has one."""
    if folder is not None:
        save_model(setup.model, str(folder / "model.safetensors"))


def write_files(
    folder: Path, result: Result | RehearsalResult, timelines: Iterable[Timeline]
) -> None:
    """Write result.json, trace.json and report.html."""
    write_trace(folder / "trace.json", timelines)
    (folder / "result.json").write_text(result.model_dump_json(indent=2) + "\n")
    write_report(folder)
