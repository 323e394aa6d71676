"""What each rank does in a run of strategy subbatch: build its part, profile, plan, train."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from paceline.core.errors import InvalidInput
from paceline.core.timeline import Timeline
from paceline.core.workload import Workload
from paceline.data.dataset import Dataset
from paceline.links.group import Group
from paceline.models import describe
from paceline.planner import Forecast, forecast
from paceline.record.clock import clock_for
from paceline.record.merge import gather_timeline
from paceline.result import Result
from paceline.runs import Setup, Trained
from paceline.runs import result_of as result_of_run
from paceline.settings import TrainSettings
from paceline.strategies import STRATEGIES
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.fit import Fitted, fit
from paceline.strategies.subbatch.learner import Parallel
from paceline.strategies.subbatch.recording import PassRecorder
from paceline.strategies.subbatch.run import head_nbytes, split, train, widths_of
from paceline.strategies.subbatch.sharded import save
from paceline.strategies.subbatch.traffic import planned
from paceline.subbatch_result import SplitRow, TrafficRow
from paceline.training.fitted import architected
from paceline.training.loop import Epoch, share_batches

_COPIES = 3  # of a parameter: itself, its gradient, and its momentum


@dataclass(frozen=True)
class SplitSetup(Setup):
    """A rank's part of a model, and its data; `workload` describes the whole model."""

    parallel: Parallel
    config: SubBatch


@dataclass(frozen=True)
class SplitTrained:
    """What `runs.Trained` has, and the bytes that each rank sent in a step, by purpose."""

    trained: Trained
    sent_nbytes: tuple[dict[str, float], ...]

    @property
    def chosen(self) -> Forecast:
        """The plan that was carried out."""
        return self.trained.chosen

    @property
    def timeline(self) -> Timeline:
        """What all ranks did in the traced steps."""
        return self.trained.timeline


def build(settings: TrainSettings, group: Group) -> SplitSetup:
    """Load the data, and build this rank's part of the model for it.

    The model is described without its values, so that no rank ever has a whole head (`narrow`).
    InvalidInput if data, model, head and workers do not fit each other.
    """
    if group.world_size != settings.workers:
        raise InvalidInput(f"workers: {settings.workers} asked for, {group.world_size} started")
    config = settings.config()
    found = architected(settings.model, settings.data, settings.seed)
    model, data = found.build, found.data
    batches = share_batches(data, settings.batch_size, settings.seed, group)
    size = -(-settings.batch_size // settings.workers)
    workload = _described(model, torch.zeros(size, *data.sample_shape), settings.model)
    parallel = split(model, workload, config, group, settings.seed)
    _check_outputs(parallel, data, settings.model)
    return SplitSetup(settings, group, parallel.model, data, batches, workload, parallel, config)


def _described(model: Callable[[], nn.Module], inputs: torch.Tensor, name: str) -> Workload:
    """Describe the model without its values or, if it cannot do without, with them."""
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                built = model().train()
            return describe(built, inputs, name)
        except Exception:
            return describe(model().train(), inputs, name)


def _check_outputs(parallel: Parallel, data: Dataset, name: str) -> None:
    if data.train.__getitems__([0])[1].dtype == torch.bool:
        raise InvalidInput(
            f"data: {data.name} has samples with several labels, which cannot be trained on by "
            "subbatch; its loss is of one class a sample"
        )
    if parallel.num_classes < data.num_classes:
        raise InvalidInput(
            f"model {name}: has {parallel.num_classes} outputs, but {data.name} has "
            f"{data.num_classes} classes"
        )


def profile_here(setup: SplitSetup) -> Fitted:
    """Measure this rank's part of a step, and the exchanges, on all ranks together."""
    settings, group = setup.settings, setup.group
    return fit(
        setup.parallel,
        setup.workload,
        setup.config,
        group,
        setup.source,
        setup.data.test,
        setup.sgd,
        settings.profile_s,
    )


def plan_here(setup: SplitSetup, measured: Fitted) -> list[Forecast]:
    """Return what a step would take: of a model that no rank has whole, by subbatch alone."""
    strategy = STRATEGIES["subbatch"]
    samples = setup.samples_per_step
    return [
        forecast(setup.workload, measured.machine, strategy, setup.config, samples, measured.cost)
    ]


def train_here(
    setup: SplitSetup,
    forecasts: Sequence[Forecast],
    report: Callable[[Epoch], None],
    advance: Callable[[], None],
    say: Callable[[str], None],
) -> SplitTrained:
    """Train on all ranks."""
    settings, group = setup.settings, setup.group
    device = forecasts[0].devices[group.rank]
    recorder = PassRecorder(clock_for(group.device), device, group.rank)
    job = setup.job(recorder, report, advance)
    done = train(job, setup.config, setup.parallel, settings.seed)
    outcome = done.outcome
    timeline = gather_timeline(outcome.spans, outcome.offset, group)
    sent = group.gather(done.sent_nbytes)
    return SplitTrained(Trained(outcome, timeline, forecasts[0], ()), tuple(sent))


def result_of(
    setup: SplitSetup, run_id: str, forecasts: Sequence[Forecast], trained: SplitTrained
) -> Result:
    """Bring together what all ranks have to say of a run. All ranks must call it together."""
    result = result_of_run(setup, run_id, forecasts, trained.trained)
    return result.model_copy(update={"split": _split_row(setup, trained)})


def _split_row(setup: SplitSetup, trained: SplitTrained) -> SplitRow:
    by_plan = planned(setup.workload, trained.chosen.machine, setup.config)
    whole, _ = head_nbytes(setup.parallel)
    rows = tuple(
        TrafficRow(
            purpose=purpose,
            nbytes_per_step=max(one[purpose] for one in trained.sent_nbytes),
            planned_nbytes_per_step=nbytes,
        )
        for purpose, nbytes in by_plan.items()
    )
    own = setup.group.gather(head_nbytes(setup.parallel)[1])
    return SplitRow(
        head=tuple(stage.name for stage in setup.parallel.stages),
        traffic=rows,
        head_state_nbytes=_COPIES * whole,
        own_state_nbytes=tuple(_COPIES * nbytes for nbytes in own),
    )


def save_here(setup: SplitSetup, folder: Path | None) -> None:
    """Have rank 0 write the whole model into its folder; all ranks call it together."""
    path = (folder or Path()) / "model.safetensors"
    save(path, setup.model, widths_of(setup.parallel), setup.group)
