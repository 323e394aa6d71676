"""Run strategy subbatch: each rank has the whole body, and some outputs of the head's layers.

The body's gradients are averaged layer by layer. The parameters, gradients and momentum of a rank's
outputs of the head are nowhere else. Where the session's device paces layers, stand-ins take the
place of the model's; step, exchanges and measurements are the same.

`profile` measures each part of a step by itself. The steps are real ones, but nothing overlaps: an
exchange is over before the next computation begins, and the body's gradients are exchanged after
its backward. So each part takes what it takes alone, encoding and decoding included, and the plan
decides how they overlap.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.core.calibration import LinearTime, linked_in_ring
from paceline.core.cost import Measured, Roofline
from paceline.core.errors import InvalidInput
from paceline.core.machine import CodecSpeed, Machine
from paceline.core.outcome import Outcome, SplitHead, Traffic
from paceline.core.plan import COMPUTE, Kind, PriceKey
from paceline.core.settings import RehearseSettings, TrainSettings
from paceline.core.strategy import Calibrated, Window
from paceline.core.timeline import Timeline
from paceline.core.wire_format import WIRE_FORMATS
from paceline.core.workload import Workload
from paceline.exchange import loop, step
from paceline.exchange import setup as setups
from paceline.exchange.checkpoints import State
from paceline.exchange.learner import Learner
from paceline.exchange.replicas import about, outcome_of
from paceline.exchange.session import TrainingSession
from paceline.links.group import Group
from paceline.measure.layers import with_idle_cores
from paceline.measure.this_machine import Speed, this_machine
from paceline.measure.timing import endless, median_durations, num_rounds
from paceline.models import describe, find
from paceline.models.factory import architected, workload_of
from paceline.recipes.named import USUAL_DATA, recipe_of_data
from paceline.recipes.optimizers import optimizer_for
from paceline.record.clock import clock_for
from paceline.record.merge import clock_offset, gather_timeline
from paceline.strategies.subbatch import head
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.layers import HeadLayer, Sharding
from paceline.strategies.subbatch.paced import paced_model, paced_optimizer
from paceline.strategies.subbatch.parameters import build_sharded, save
from paceline.strategies.subbatch.partition import partition
from paceline.strategies.subbatch.plan import LOSS, plan
from paceline.strategies.subbatch.trainer import HeadRecorder, SplitModel, SplitTrainer

_COPIES = 3  # of a parameter: itself, its gradient, and its momentum
_NUM_WARM_UP = 2
_FEWEST_STEPS, _MOST_STEPS = 3, 40
_WITHIN_LINKS = CodecSpeed(encode_values_per_s=float("inf"), decode_values_per_s=float("inf"))
_ANY_SPEED = Speed(1e9, 1e9)  # all parts of a step are measured, so that it is never asked for
_ANY_LINE = LinearTime(0.0, 1e-9)  # as little as that of a link
_LEARNING_RATE = 1e-6  # NaNs and denormals would compute at other speeds


def split(
    build: Callable[[], nn.Module], workload: Workload, config: SubBatch, group: Group, seed: int
) -> SplitModel:
    """Return this rank's part of the model that `build` makes after `torch.manual_seed(seed)`.

    `workload` describes a rank's largest part of a step. Raises InvalidInput with the layer that
    keeps the head from being split.
    """
    layers = head.cut(workload, config.head, config.workers).head
    names = [layer.name for layer in layers]
    shardings = [Sharding.even(head.num_outputs(layer), config.workers) for layer in layers]
    own = {name: one.shard(group.rank) for name, one in zip(names, shardings, strict=True)}
    module = build_sharded(build, own, seed).train().to(group.device)
    body, traced = partition(module, names, workload.name)
    own_head = (HeadLayer(*one, group.rank) for one in zip(traced, shardings, strict=True))
    return SplitModel(module, body, tuple(own_head), workload.batch_size)


@contextmanager
def start(session: TrainingSession) -> Iterator["SplitRunner"]:
    """Yield the runner of this rank. Raises InvalidInput if model, data and workers do not fit."""
    setups.check_world_size(session.settings.workers, session.group)
    yield SplitRunner(session, *(_paced(session) if session.is_rehearsal else _real(session)))


class SplitRunner:
    """Trains or rehearses this rank's part of a model."""

    def __init__(
        self, session: TrainingSession, model: SplitModel, trainee: setups.TrainingSetup
    ) -> None:
        self._session, self._model, self._trainee = session, model, trainee
        # Without speeds and links, until they are measured.
        self._machine = this_machine(session.group, [_ANY_SPEED] * session.group.world_size)
        self.workload = trainee.workload  # this rank's largest part of a step, of the whole model
        self.samples_per_step = trainee.samples_per_step  # over all workers, on average
        self.about = about(session, trainee.workload)

    def measure(self) -> Calibrated:
        """Measure the parts of a step, and the exchanges, each by itself."""
        session, seconds = self._session, self._session.settings.profile_s
        found = profile(self._model, self._trainee, session.config, session.group, seconds)
        self._machine = with_idle_cores(found.machine) if session.is_rehearsal else found.machine
        return Calibrated(self._machine, found.cost)

    def train(self, config: SubBatch) -> Outcome:
        """Train or rehearse with this configuration."""
        session, group, trainee = self._session, self._session.group, self._trainee
        device = self._machine.devices[group.rank].name
        recorder = HeadRecorder(clock_for(group.device), device, group.rank)
        seed = getattr(session.settings, "seed", 0)
        # A profile has drawn random numbers before; and ranks must not drop out the same units.
        torch.manual_seed(seed + group.rank)
        trainer = SplitTrainer(
            self._model, config, group, recorder, trainee.optimizer, trainee.learning_rate, seed
        )
        learner = Learner(self._model.body, trainer.step, trainer.test, _unsaved, _unloaded)
        trained = loop.train(session, trainee, recorder, trainer.replica, learner)
        trainer.thread.close()  # not after an error: it may wait for a lost rank
        # For each purpose, the bytes of the rank that sent most.
        sent = group.gather(trainer.sent_nbytes)
        to_send = planned_nbytes(self.workload, self._machine, config)
        return outcome_of(
            session,
            trainee,
            trained,
            partial(plan, self.workload, self._machine, config),
            config=config,
            traffic=tuple(
                Traffic(purpose, max(own[purpose] for own in sent), nbytes)
                for purpose, nbytes in to_send.items()
            ),
            head=self._head(),
        )

    def _head(self) -> SplitHead:
        whole = own = 0
        for layer in self._model.head:
            for parameter in layer.parameters:
                own += parameter.nbytes
                whole += parameter.nbytes // layer.shard.size * layer.sharding.num_outputs
        return SplitHead(
            layers=tuple(self._model.shardings),
            state_nbytes=_COPIES * whole,
            own_state_nbytes=tuple(_COPIES * nbytes for nbytes in self._session.group.gather(own)),
        )

    def save(self, path: Path) -> None:
        """Write the whole model on rank 0; all ranks call it together."""
        save(path, self._model.module, self._model.shardings, self._session.group)


def _unsaved() -> State:
    return State({}, {})


def _unloaded(state: State) -> None:
    raise InvalidInput("resume: strategy subbatch cannot yet")


def _real(session: TrainingSession) -> tuple[SplitModel, setups.TrainingSetup]:
    """Load the data, and build this rank's part of the model for it.

    The model is described without its values, so that no rank ever has a whole head.
    """
    settings, group = session.settings, session.group
    assert isinstance(settings, TrainSettings)
    make = optimizer_for(settings)
    data, name, num_classes, _ = architected(
        settings.model, settings.data or USUAL_DATA, settings.seed
    )
    build = partial(find(name).build, num_classes)
    batches = setups.share_batches(len(data.train), settings.batch_size, settings.seed, group)
    inputs = torch.zeros(-(-settings.batch_size // group.world_size), *data.sample_shape)
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                built = build().train()
            workload = describe(built, inputs, settings.model)
        except Exception:  # it cannot do without its values
            workload = describe(build().train(), inputs, settings.model)
    model = split(build, workload, session.config, group, settings.seed)
    if data.train.__getitems__([0])[1].dtype == torch.bool:
        raise InvalidInput(
            f"data: {data.name} has samples with several labels, which cannot be trained on by "
            "subbatch; its loss is of one class a sample"
        )
    if model.num_classes < data.num_classes:
        raise InvalidInput(
            f"model {settings.model}: has {model.num_classes} outputs, but {data.name} has "
            f"{data.num_classes} classes"
        )
    return model, setups.TrainingSetup(
        model=model.module,
        workload=workload,
        source=setups.epochs_of(batches, data.train, group.device),
        epoch_steps=(len(batches),) * settings.epochs,
        samples_per_step=len(data.train) / len(batches),
        optimizer=lambda model: make(model.parameters()),
        learning_rate=settings.learning_rate,
        recipe=recipe_of_data(data),
    )


def _paced(session: TrainingSession) -> tuple[SplitModel, setups.TrainingSetup]:
    settings, device, config = session.settings, session.device, session.config
    assert isinstance(settings, RehearseSettings)
    assert device is not None  # `stretch` is no setting of this strategy
    sizes = head.shares(settings.batch_size, config.workers)
    workload = workload_of(settings.model, sizes[0], settings.input_shape)
    times, own = device.times(workload), sizes[session.group.rank]
    model = paced_model(workload, config, session.group.rank, times)
    share = step.Share(torch.zeros(own, 1), torch.zeros(own, dtype=torch.int64), 1.0)
    return model, setups.TrainingSetup(
        model=model.module,
        workload=workload,
        source=lambda epoch, first_step=0: repeat(share),
        epoch_steps=setups.rehearsed_steps(settings),
        samples_per_step=settings.batch_size,
        optimizer=paced_optimizer(times.update_s / workload.num_parameters),
        learning_rate=0.0,
        times=times,
    )


def profile(
    model: SplitModel, trainee: setups.TrainingSetup, config: SubBatch, group: Group, seconds: float
) -> Calibrated:
    """Measure for about `seconds`, on all ranks together; afterwards the model is what it was."""
    tensors = [*model.module.parameters(), *model.module.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    random_state = torch.get_rng_state()
    machine = this_machine(group, [_ANY_SPEED] * group.world_size)
    recorder = HeadRecorder(clock_for(group.device), machine.devices[group.rank].name, group.rank)

    def optimizer(module: nn.Module) -> Optimizer:
        made = trainee.optimizer(module)
        for parameters in made.param_groups:
            parameters["lr"] = _LEARNING_RATE
        return made

    trainer = SplitTrainer(model, config, group, recorder, optimizer)
    shares = endless(lambda: trainee.source(0))
    trainer.thread.is_synchronous = True
    for _ in range(1 + _NUM_WARM_UP):
        trainer.step(shares)
    first, *_, last = recorder.step_ends()
    longest_s = max(group.gather((last - first) / _NUM_WARM_UP))
    num_steps = num_rounds(seconds, longest_s, _FEWEST_STEPS, _MOST_STEPS)
    trainer.replica.record(recorder)
    recorder.start_trace(model.body)
    for _ in range(num_steps):
        trainer.step(shares)
    recorder.stop_trace()
    timeline = gather_timeline(recorder.spans(), clock_offset(group), group)
    trainer.close()
    with torch.no_grad():
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)
            tensor.grad = None
    torch.set_rng_state(random_state)
    return _calibrated(timeline, trainee.workload, machine, config)


def _calibrated(
    timeline: Timeline, workload: Workload, machine: Machine, config: SubBatch
) -> Calibrated:
    """Return the machine, and the median seconds of what is computed and exchanged."""
    spans = timeline.spans
    # Computation is measured over all sub-batches together; exchanges belong to no single owner.
    computed = median_durations(
        [span for span in spans if span.kind in COMPUTE],
        lambda span: PriceKey(span.on[0].owner, span.kind, span.part),
    )
    exchanged = median_durations(
        [span for span in spans if span.kind not in COMPUTE],
        lambda span: PriceKey("", span.kind, span.part, span.sub_batch),
    )
    if len(machine.devices) > 1:
        # The measured seconds of an exchange include encoding and decoding.
        machine = linked_in_ring(machine, machine.devices, _ANY_LINE)
        speeds = {"codecs": {one.kernel: _WITHIN_LINKS for one in WIRE_FORMATS.values()}}
        hosts = tuple(host.model_copy(update=speeds) for host in machine.hosts)
        devices = tuple(device.model_copy(update=speeds) for device in machine.devices)
        machine = machine.model_copy(update={"hosts": hosts, "devices": devices})
    durations: dict[PriceKey, float] = {}
    for task in plan(workload, machine, config, Window(1)).tasks:
        key = task.price_key
        if task.kind not in COMPUTE:
            durations[key] = exchanged[key._replace(owner="")]
        elif (alike := key._replace(sub_batch=None)) in computed:
            durations[key] = computed[alike]
    return Calibrated(machine, Measured(durations, Roofline.of(machine)))


def planned_nbytes(workload: Workload, machine: Machine, config: SubBatch) -> dict[str, float]:
    """Return the bytes that each worker sends in a step by the plan, by purpose."""
    if len(machine.devices) > 1:
        # The workers of one host share its link, and a task has the bytes of all of them: so each
        # gets a host of its own.
        names = [f"host{i}" for i in range(len(machine.devices))]
        hosts = tuple(machine.hosts[0].model_copy(update={"name": name}) for name in names)
        devices = tuple(
            device.model_copy(update={"host": name})
            for device, name in zip(machine.devices, names, strict=True)
        )
        spread = machine.model_copy(update={"hosts": hosts, "devices": devices})
        machine = linked_in_ring(spread, devices, _ANY_LINE)
    nbytes = {"activations": 0.0, "activation_gradients": 0.0, "loss": 0.0, "gradients": 0.0}
    for task in plan(workload, machine, config, Window(1)).tasks:
        if task.kind is Kind.SEND:
            nbytes["loss" if task.part == LOSS else "activations"] += task.cost.nbytes
        elif task.kind is Kind.REDUCE:
            is_body = task.sub_batch is None
            nbytes["gradients" if is_body else "activation_gradients"] += task.cost.nbytes
    return nbytes
