"""What each rank does in a run: build, describe, profile, plan; train, and write it down."""

import resource
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_model
from torch import nn

from paceline.core.compare import compare, conform
from paceline.core.errors import InvalidInput
from paceline.core.strategy import Window
from paceline.core.timeline import Timeline
from paceline.core.workload import Workload
from paceline.data import Dataset, ShardedBatches, load, loader
from paceline.links.group import Group
from paceline.models import describe, find
from paceline.planner import Forecast, chunk_seconds, forecast, rank
from paceline.record.clock import clock_for
from paceline.record.merge import gather_timeline
from paceline.record.recorder import Recorder
from paceline.record.trace import write_trace
from paceline.report import write_report
from paceline.result import ComparisonTable, EpochRow, PlanRow, RehearsalResult, Result
from paceline.settings import RunSettings, TrainSettings
from paceline.strategies import STRATEGIES, find_strategy, probers
from paceline.training.loop import Epoch, Job, Outcome, share_batches
from paceline.training.profile import Profile, profile
from paceline.training.step import SGD, Share, shares
from paceline.training.this_machine import facts

SLACK_S = 1e-3  # hooks of one gradient run one after another, and each takes its mark


@dataclass(frozen=True)
class Setup:
    """A model and its data on one rank; `workload` describes the rank's part of a step."""

    settings: TrainSettings
    group: Group
    model: nn.Module
    data: Dataset
    batches: ShardedBatches
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
    def sgd(self) -> SGD:
        """The optimizer's settings."""
        return SGD(self.settings.learning_rate, self.settings.momentum)


def build(settings: TrainSettings, group: Group) -> Setup:
    """Load the data, build the model for it, and describe it. InvalidInput if they do not fit."""
    if group.world_size != settings.workers:
        raise InvalidInput(f"workers: {settings.workers} asked for, {group.world_size} started")
    settings.config()
    architecture = find(settings.model)
    data = load(settings.data, architecture.input_shape, settings.seed)
    batches = share_batches(data, settings.batch_size, settings.seed, group)
    torch.manual_seed(settings.seed)
    model = architecture.build(None if architecture.num_classes is None else data.num_classes)
    size = -(-settings.batch_size // settings.workers)
    inputs = torch.zeros(size, *data.sample_shape)
    workload = describe(model, inputs, settings.model)
    _check_outputs(model, data, settings.model)
    return Setup(settings, group, model.to(group.device), data, batches, workload)


@torch.no_grad()
def _check_outputs(model: nn.Module, data: Dataset, name: str) -> None:
    inputs, _ = data.train.__getitems__([0])
    outputs = model.eval()(inputs)
    if not isinstance(outputs, torch.Tensor) or outputs.ndim != 2:
        shape = getattr(outputs, "shape", type(outputs).__name__)
        raise InvalidInput(f"model {name}: gives {shape}, but must give (batch, classes)")
    if outputs.shape[1] < data.num_classes:
        raise InvalidInput(
            f"model {name}: has {outputs.shape[1]} outputs, but {data.name} has "
            f"{data.num_classes} classes"
        )


def profile_here(setup: Setup) -> Profile:
    """Measure the model and the link on this machine, on all ranks together."""
    settings, group = setup.settings, setup.group
    data = loader(setup.data.train, setup.batches)

    def source() -> Iterator[Share]:
        return shares(setup.batches, data, group.device)

    return profile(
        setup.model,
        setup.workload,
        source,
        setup.sgd,
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
        for name, strategy in STRATEGIES.items()
    }


def plan_here(setup: Setup, measured: Profile) -> list[Forecast]:
    """Return what each strategy would take with these workers, best first."""
    forecasts = []
    for name, config in _configs(setup).items():
        strategy = STRATEGIES[name]
        machine, cost = measured.calibrated(strategy, config)
        if name == "host" and "chunk" not in setup.settings.options:
            sizes = chunk_seconds(
                setup.workload, machine, strategy, config.workers, cost, config.codec
            )
            config = replace(config, chunk=min(sizes, key=sizes.__getitem__))
        forecasts.append(
            forecast(setup.workload, machine, strategy, config, setup.samples_per_step, cost)
        )
    return rank(forecasts)


def train_here(
    setup: Setup,
    chosen: Forecast,
    report: Callable[[Epoch], None],
    advance: Callable[[], None],
) -> tuple[Outcome, Timeline]:
    """Train on all ranks; return this rank's outcome and the timeline of all ranks."""
    settings, group = setup.settings, setup.group
    device = chosen.devices[group.rank]
    job = Job(
        model=setup.model,
        data=setup.data,
        batches=setup.batches,
        epochs=settings.epochs,
        sgd=setup.sgd,
        group=group,
        recorder=Recorder(clock_for(group.device), device, group.rank),
        report=report,
        advance=advance,
    )
    # The profile has drawn random numbers; and ranks must not drop out the same units.
    torch.manual_seed(settings.seed + group.rank)
    runner = import_module(find_strategy(settings.strategy).run)
    outcome: Outcome = runner.train(job, chosen.config)
    return outcome, gather_timeline(outcome.spans, outcome.offset, group)


def result_of(
    setup: Setup,
    run_id: str,
    forecasts: Sequence[Forecast],
    outcome: Outcome,
    measured: Timeline,
) -> Result:
    """Bring together what all ranks have to say of a run. All ranks must call it together."""
    settings, group = setup.settings, setup.group
    chosen = next(f for f in forecasts if f.strategy == settings.strategy)
    plan = find_strategy(settings.strategy).plan(
        setup.workload, chosen.machine, chosen.config, Window(measured.num_steps())
    )
    measured_step_s = median(outcome.step_seconds)
    slack_s = SLACK_S + 2 * max(group.gather(outcome.offset.error_s))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Result(
        id=run_id,
        settings=settings,
        machine=facts(group.device),
        plans=tuple(PlanRow.of(forecast) for forecast in forecasts),
        epochs=tuple(EpochRow(**asdict(epoch)) for epoch in outcome.epochs),
        accuracy=outcome.epochs[-1].accuracy,
        predicted_step_s=chosen.step_s,
        measured_step_s=measured_step_s,
        samples_per_s=setup.samples_per_step / measured_step_s,
        comparison=ComparisonTable.of(compare(chosen.timeline, measured)),
        faults=tuple(conform(plan, measured, slack_s)),
        peak_memory_bytes=tuple(group.gather(peak)),
    )


def make_folder(settings: RunSettings, run_id: str) -> Path:
    """Make the run's folder and return it; InvalidInput if that cannot be."""
    folder = settings.output / run_id
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise InvalidInput(f"output: cannot make {folder}: {error.strerror}") from None
    return folder


def write(folder: Path, model: nn.Module, result: Result, timelines: Iterable[Timeline]) -> None:
    """Write model.safetensors, result.json, trace.json and report.html."""
    save_model(model, str(folder / "model.safetensors"))
    write_files(folder, result, timelines)


def write_files(
    folder: Path, result: Result | RehearsalResult, timelines: Iterable[Timeline]
) -> None:
    """Write all but the model."""
    write_trace(folder / "trace.json", timelines)
    (folder / "result.json").write_text(result.model_dump_json(indent=2) + "\n")
    write_report(folder)
