"""Build a run's recipe, model, body (first layers) and head (last layers) from its `RunSpec`.

All processes of a run build equal models. In a rehearsal, the layers sleep instead of computing.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from paceline.codecs.stand_ins import stand_ins_for
from paceline.core.cutting import Split, with_refused_cuts
from paceline.core.errors import InvalidInput
from paceline.core.machine import DeviceKind
from paceline.core.settings import RehearseSettings, TrainSettings
from paceline.core.wire_format import Purpose
from paceline.core.workload import Workload
from paceline.exchange.loop import traced_steps
from paceline.exchange.session import TrainingSession
from paceline.exchange.setup import NUM_TRACED, epoch_steps, learning_by, learning_of
from paceline.exchange.step import Learning, Optimize
from paceline.links.devices import first_device
from paceline.links.group import boot_id
from paceline.rpc.batch_layout import BatchLayout
from paceline.strategies.wheel.config import MOMENTUM, RunSpec, Wheel
from paceline.strategies.wheel.remote import ChildSettings
from paceline.strategies.wheel.server import LentHead
from paceline.strategies.wheel.split import FROM_HUB, TO_HUB, messages, pace_of, split
from paceline.training.data.batch import Batch, call
from paceline.training.data.dataset import TensorSamples
from paceline.training.data.sampler import ShardedBatches
from paceline.training.models import describe
from paceline.training.models.halves import UNTIE, Halves, cut, tied
from paceline.training.models.layers import LayerModule, layers_of
from paceline.training.models.paced import PacedSGD, PacedWhole, paced_halves
from paceline.training.recipes.named import is_given, recipe_of, workload_of
from paceline.training.recipes.recipe import Recipe, built

NUM_WARM_UP, NUM_LAST = 2, 1  # numbers of unmeasured steps: the first and last steps of a run
# In a rehearsal, each child hub must send this many mean gradients, so that two are measured.
_FEWEST_MEANS = NUM_WARM_UP + NUM_LAST + 2
_NUM_EXAMPLES = 2  # samples to try a cut: batch norm needs two
_SPAN_NBYTES = 400  # upper bound of the size of a recorded task in a trace's JSON
_MIN_MESSAGE_NBYTES = 4 << 20


@dataclass(frozen=True)
class TrainingJob:
    """The spec of a run, and the recipe, the model and its two halves built from the spec.

    `workload`: the layers, with their costs for one worker's share of a batch. `device`: the device
    on which the head computes. `optimizer`: makes the optimizer of a model. `learning`: the loss,
    its precision and gradient clipping. `schedule`: makes an optimizer's learning-rate schedule.
    """

    spec: RunSpec
    recipe: Recipe
    model: nn.Module
    halves: Halves
    workload: Workload
    device: torch.device
    optimizer: Optimize
    learning: Learning
    schedule: Callable[[Optimizer], LRScheduler | None] = lambda optimizer: None

    @cached_property
    def parts(self) -> Split:
        """The layers of body and head, with their costs."""
        return split(self.workload, self.spec.config)

    @property
    def kept_on(self) -> torch.device:
        """The device in whose memory the server keeps the model."""
        return self.halves.body_parameters[0].device

    @cached_property
    def batches(self) -> BatchLayout:
        """The shapes and dtypes of a batch's inputs and targets."""
        return BatchLayout(self.recipe)

    @property
    def layout(self) -> str:
        """The description of the run, as JSON, which must be equal at the hub and all workers."""
        return layout_of(self.spec, self.halves, self.recipe, self.batches)

    @cached_property
    def _sharding(self) -> ShardedBatches:
        size, num_samples = self.spec.batch_size, len(self.recipe.samples)
        return ShardedBatches(num_samples, size, 0, self.spec.num_parts, self.spec.seed)

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in which all workers together train once on every sample."""
        return len(self._sharding)

    def share(self, worker: int, step: int) -> tuple[int, float]:
        """Return a worker's number of samples in a step, and the factor for their mean loss.

        With the factors, all samples of a step have equal weight, although shares differ in size.
        """
        part, step = self.spec.part(worker), step % self.steps_per_epoch
        count = self._sharding.size_of(part, step)
        return count, count * self.spec.num_parts / self._sharding.global_sizes[step]

    @property
    def max_message_nbytes(self) -> int:
        """An upper bound of the bytes of one message."""
        sent = messages(self.parts, self.spec.config)
        together = sent[Purpose.LABELS].nbytes + sent[Purpose.ACTIVATIONS].nbytes
        num_spans = NUM_TRACED * (2 * len(self.parts.body.layers) + len(Purpose))
        single = (sent[purpose].nbytes for purpose in (*TO_HUB, *FROM_HUB))
        most = max(together, num_spans * _SPAN_NBYTES, self.workload.gradient_nbytes, *single)
        return max(_MIN_MESSAGE_NBYTES, most + most // 8)


def training_job(
    session: TrainingSession, settings: TrainSettings, device: torch.device
) -> TrainingJob:
    """Load the data, build the model and cut it in two; InvalidInput for unsuitable settings."""
    if settings.listen is not None and is_given(settings.model):
        problem = "must be a name that workers on other machines can import"
        hint = "name it as package.module:factory"
        raise InvalidInput("model", problem, got=settings.model, hint=hint)
    config: Wheel = session.config
    recipe = recipe_of(settings.model, settings.data, settings.seed)
    model = built(recipe, settings.seed)
    workload = _described(recipe, model, ceil(settings.batch_size / config.workers), settings.model)
    workload = _tried(workload, config, model, recipe)
    num_samples = len(recipe.samples)
    batches = ShardedBatches(num_samples, settings.batch_size, 0, config.workers, settings.seed)
    sizes = epoch_steps(len(batches), settings)
    own = {"model": settings.model, "data": settings.data, "precision": settings.precision}
    spec = _traced(session, split(workload, config), sizes, seed=settings.seed, **own)
    # Settings count steps, but schedules count updates: each step has one update per worker.
    counted: dict[str, Any] = {"warmup_steps": settings.warmup_steps * config.workers}
    is_sgd = settings.optimizer == "sgd" or (not settings.optimizer and not recipe.optimizer)
    if settings.momentum == MOMENTUM and not is_sgd:  # the default MOMENTUM is for SGD only
        counted["momentum"] = None
    num_updates = spec.num_steps * config.workers
    optimizer, schedule = learning_by(recipe, settings.model_copy(update=counted), num_updates)
    model, halves = model_and_halves(spec, recipe, device, model)
    updating = optimizer, learning_of(recipe, settings), schedule
    return TrainingJob(spec, recipe, model, halves, workload, device, *updating)


def rehearsal_job(session: TrainingSession, settings: RehearseSettings) -> TrainingJob:
    """Build a job whose layers sleep for as long as `session.device` would compute."""
    device = session.device
    if device is None:
        raise InvalidInput("device", "is required", hint="for example k40-gigabit/gpu0")
    size = ceil(settings.batch_size / session.config.workers)
    workload = workload_of(settings.model, size, settings.input_shape)
    parts = split(workload, session.config)
    times, is_gpu = device.times(workload), device.kind == DeviceKind.GPU
    pace = pace_of(parts, times, device.rate, is_gpu, settings.input_shape)
    extra, config = NUM_WARM_UP + NUM_LAST, session.config
    num_steps = settings.steps + extra
    if config.child_hubs and num_steps * config.workers_of_hub // config.gathered < _FEWEST_MEANS:
        least = ceil(_FEWEST_MEANS * config.gathered / config.workers_of_hub) - extra
        problem = f"must be at least {least} with gather={config.gathered}"
        raise InvalidInput("steps", problem, got=settings.steps)
    own = {"model": settings.model, "data": None, "seed": 0, "pace": pace}
    spec = _traced(session, parts, [num_steps], **own)
    return _job_in(spec, pace.update_s)


def child_job(settings: ChildSettings, parent: RunSpec) -> TrainingJob:
    """Build a child hub's job from its parent's run; InvalidInput if their settings conflict."""
    if parent.pace is None:
        config = settings.config(parent.head)
    elif parent.tree is None:
        raise InvalidInput("connect", "must be the address of a hub that rehearses with child_hubs")
    else:  # in a rehearsal, the root configures its child hubs
        config = parent.tree.of_child
    place = (parent.part(settings.number), parent.num_parts)
    own = {"config": config, "place": place, "boot_id": boot_id(), "tree": None}
    unmeasured = {"first_traced": 0, "num_traced": 0}
    if parent.pace is None:
        unmeasured["profile_s"] = 0
    return _job_in(parent.model_copy(update=own | unmeasured))


def _job_in(spec: RunSpec, update_s: float = 0.0) -> TrainingJob:
    """Build the job of a rehearsal or a child hub; its optimizer only sleeps, for `update_s`."""
    recipe, device, model = recipe_in(spec), torch.device("cpu"), None
    if spec.pace is not None:
        workload = workload_of(spec.model, spec.pace.samples, spec.pace.input_shape)
    else:
        device, model = first_device(), built(recipe, spec.seed)
        workload = _described(recipe, model, ceil(spec.batch_size / spec.num_parts), spec.model)
    model, halves = model_and_halves(spec, recipe, device, model)
    own = spec, recipe, model, halves, workload, device
    learning = learning_in(spec, recipe)
    return TrainingJob(*own, lambda model: PacedSGD(model.parameters(), update_s), learning)


def server_options(job: TrainingJob) -> dict[str, Any]:
    """Return the arguments of `ParameterServer` that all hubs need."""
    lent = None
    if job.kept_on != job.device:
        model, halves = model_and_halves(job.spec, job.recipe, job.device)
        lent = LentHead(model, halves.head, job.halves.head, job.device)
    return {
        "config": job.spec.config,
        "learning": job.learning,
        "checks_values": job.spec.pace is None,
        "lent": lent,
        "steps_per_epoch": job.steps_per_epoch,
    }


def recipe_in(spec: RunSpec) -> Recipe:
    """Return a run's recipe (model, data, loss); in a rehearsal, inputs and targets are zeros."""
    if spec.pace is None:
        return recipe_of(spec.model, spec.data, spec.seed)
    num_samples = spec.num_steps * spec.batch_size
    inputs = torch.zeros(1, 1).expand(num_samples, -1)
    targets = torch.zeros(1, spec.pace.target_nbytes, dtype=torch.uint8).expand(num_samples, -1)
    samples, loss = TensorSamples(inputs, targets), lambda scores, _: scores.mean()
    return Recipe(name=spec.model, model=nn.Module, train=samples, loss=loss)


def learning_in(spec: RunSpec, recipe: Recipe) -> Learning:
    """Return the loss and the precision with which a run trains."""
    return Learning(recipe.loss, bfloat16=spec.precision == "bfloat16")


def model_and_halves(
    spec: RunSpec, recipe: Recipe, device: torch.device, model: nn.Module | None = None
) -> tuple[nn.Module, Halves]:
    """Build a run's model, unless `model` is given, and cut it into halves.

    `device`: where the head computes. The model is put on this device or, with
    `server_memory="host"`, in main memory. In a rehearsal, the layers of the model sleep.
    """
    if (pace := spec.pace) is not None:
        workload = workload_of(spec.model, pace.samples, pace.input_shape)
        parts = split(workload, Wheel(head=spec.head))
        times = pace.forward_s, pace.backward_s
        like = stand_ins_for(spec.config.gradients)
        return paced_halves(parts.body, parts.head, *times, gradient_like=like)
    device = torch.device("cpu") if spec.config.server_memory == "host" else device
    model = (built(recipe, spec.seed) if model is None else model).to(device).train()
    rows = range(min(_NUM_EXAMPLES, len(recipe.samples)))  # samples on which `cut` runs the model
    inputs, _ = Batch.of(recipe.samples.__getitems__(rows)).to(device)
    return model, cut(model, inputs, spec.head)


def activations_of(halves: Halves, inputs: Any, learning: Learning) -> Tensor:
    """Run the body (first layers); return its outputs in the dtype of the parameters."""
    with learning.autocast(tree_leaves(inputs)[0].device):
        activations: Tensor = call(halves.body, inputs)
    return activations.to(next(halves.body.parameters()).dtype)


def layers_in(model: nn.Module, names: tuple[str, ...]) -> tuple[LayerModule, ...]:
    """Return the layers of `model` whose first parameter's name is in `names`."""
    layers = model.layers if isinstance(model, PacedWhole) else layers_of(model)
    return tuple(layer for layer in layers if layer.parameters[0][0] in names)


def layout_of(spec: RunSpec, halves: Halves, recipe: Recipe, batches: BatchLayout) -> str:
    """Return the description of a run, as JSON, which must be equal at worker and hub."""
    in_body = zip(halves.body_names, halves.body_parameters, strict=True)
    in_head = zip(halves.head_names, halves.head_parameters, strict=True)
    return json.dumps(
        {
            # Exclude boot_id: it changes if a hub resumes after a restart of the machine.
            "settings": spec.model_dump(mode="json", exclude={"boot_id"}),
            "body": {name: f"{p.dtype} {list(p.shape)}" for name, p in in_body},
            "head": {name: f"{p.dtype} {list(p.shape)}" for name, p in in_head},
            "activations": list(halves.crossing),
            "samples": len(recipe.samples),
            **batches.as_json(),
        }
    )


def _described(recipe: Recipe, model: nn.Module, size: int, name: str) -> Workload:
    workload = describe(model, recipe.example(size), name)
    return replace(workload, target_nbytes=recipe.target_nbytes(size))


def with_possible_cut(model: nn.Module, inputs: Any, workload: Workload, config: Wheel) -> Workload:
    """Try cuts of the model until one succeeds; return the workload with the failed cuts.

    `inputs`: a batch of at least two samples, on the model's device (meta is allowed).
    Raises InvalidInput if no cut is possible.
    """
    return with_refused_cuts(workload, config, first_of, partial(cut, model, inputs))


def first_of(workload: Workload, config: Wheel) -> str:
    """Return the first layer of the head."""
    return split(workload, config).first


def _tried(workload: Workload, config: Wheel, model: nn.Module, recipe: Recipe) -> Workload:
    """Add failed cuts to the workload; raise InvalidInput if tied weights prevent every cut."""
    try:
        split(workload, config)
    except InvalidInput:
        if why := tied(model, config.head):
            problem = f"{workload.name} has no head to split off: {why}"
            raise InvalidInput("strategy", problem, got="wheel", hint=UNTIE) from None
        raise
    return with_possible_cut(model.train(), recipe.example(_NUM_EXAMPLES), workload, config)


def _traced(session: TrainingSession, parts: Split, sizes: Sequence[int], **fields: Any) -> RunSpec:
    """Build a run's spec, and choose its traced steps; `sizes`: each epoch's number of steps."""
    named = replace(session.config, head=parts.first)
    epoch, step = traced_steps(sizes)
    return RunSpec(
        boot_id=boot_id(),
        config=named.of_root,
        tree=named if named.child_hubs else None,
        batch_size=session.settings.batch_size,
        profile_s=session.settings.profile_s,
        num_steps=sum(sizes),
        first_traced=sum(sizes[:epoch]) + step,
        num_traced=sizes[epoch] - step,
        **fields,
    )
