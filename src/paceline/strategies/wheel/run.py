"""Run strategy wheel: this process is the hub, which starts its workers or waits for others.

A rehearsal differs by its spec alone: its model, data and optimizer are paced stand-ins, and
nothing is tested. A child hub is served in the same way: a hub that is one worker of another, its
parent. The parent says model, data, batch size and epochs, and the root keeps the result. A child
reports in the end what its workers have done, and how many bytes that took.
"""

import logging
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import fmean

import torch
from safetensors.torch import save_model

from paceline.core.compare import conform
from paceline.core.errors import Interrupted, InvalidInput, WorkerLost
from paceline.core.outcome import Epoch, Outcome, Traffic, Updates
from paceline.core.settings import Record, RehearseSettings, TrainSettings
from paceline.core.simulate import simulate
from paceline.core.strategy import Calibrated, Window
from paceline.core.timeline import Origin, Timeline
from paceline.core.wire_format import Purpose
from paceline.devices import device_of, first_device, gpus
from paceline.exchange.checkpoints import interrupted
from paceline.exchange.learner import evaluate
from paceline.exchange.loop import score_of
from paceline.exchange.session import Progress, TrainingSession
from paceline.links.interruption import interruptible
from paceline.rpc.client import Client
from paceline.rpc.workers import connected, num_threads
from paceline.strategies.wheel import job as jobs
from paceline.strategies.wheel.checkpoint import Checkpoints
from paceline.strategies.wheel.config import RunSpec, Wheel
from paceline.strategies.wheel.hub import Hub
from paceline.strategies.wheel.measure import DeviceProfile, calibrate, profile_head
from paceline.strategies.wheel.plan import plan
from paceline.strategies.wheel.protocol import check_codecs
from paceline.strategies.wheel.remote import RUN, ChildSettings
from paceline.strategies.wheel.server import ParameterServer
from paceline.strategies.wheel.split import FROM_HUB, TO_HUB, messages
from paceline.strategies.wheel.trace import timeline_of, utilisation
from paceline.strategies.wheel.tree import ChildServer, HubPurpose, ParentHub

logger = logging.getLogger(__name__)
_CHECKPOINTS = "checkpoints"  # the folder of them in that of a run
_SLACK_S = 1e-3  # a hook of the last layer runs a moment after the layer


@contextmanager
def start(session: TrainingSession) -> Iterator["WheelRunner"]:
    """Yield a session's runner, whose processes end with it; InvalidInput if parts do not fit."""
    with ExitStack() as stack:
        yield WheelRunner(session, stack)


class WheelRunner:
    """The hub of a training or a rehearsal."""

    def __init__(self, session: TrainingSession, stack: ExitStack) -> None:
        config: Wheel = session.config
        if config.lanes > 1 and config.staleness == 0:
            raise InvalidInput(
                "staleness: lanes that alternate fetch a step ahead; allow at least 1, or take "
                "lanes=1"
            )
        self._session, self._stack = session, stack
        settings = session.settings
        hub_device, self._devices = _devices(session)
        if isinstance(settings, RehearseSettings):
            job, self._updating = jobs.rehearsal_job(session, settings)
        else:
            job, self._updating = jobs.training_job(session, settings, hub_device)
        self._job, self.workload = job, job.workload
        self.samples_per_step = job.num_samples / job.steps_per_epoch
        self.about = (
            f"{settings.model}: {job.workload.num_parameters:,} parameters in "
            f"{len(job.workload.layers)} layers; {config.workers} workers, {config.lanes} a device"
            + (f", paced as {session.device.label}" if session.device is not None else "")
        )
        check_codecs(job.spec.config, job.halves.head_parameters[0].dtype)
        optimizer = self._updating.optimizer(job.model)
        self._server = ParameterServer(
            *(job.model, job.halves, optimizer),
            num_workers=config.workers,
            staleness=config.staleness,
            staleness_decay=config.staleness_decay,
            updates_per_step=self._updating.updates_per_step,
            learning=self._updating.learning,
            schedule=self._updating.schedule(optimizer),
            checks_values=not session.is_rehearsal,
        )
        # Workers of elsewhere are told the name; those of this machine have it to themselves.
        self._run_id = session.run_id if settings.bind is None else settings.run or RUN
        self._epochs: list[Epoch] = []
        self._checkpoints: Checkpoints | None = None
        self._is_resumed = False
        if isinstance(settings, TrainSettings):
            self._checkpoints = self._opened(settings)
            stack.callback(self._checkpoints.close)
        self._hub: Hub | None = None
        self._calibrated: Calibrated | None = None

    def _opened(self, settings: TrainSettings) -> Checkpoints:
        """Go on from a run's checkpoint, if one is named, and return those of this run.

        Raises InvalidInput if there is none, if it does not fit, or for an interval of steps.
        """
        interval, every_s = settings.checkpoint_interval, 0.0
        folder = settings.output / self._session.run_id / _CHECKPOINTS
        if interval is not None:
            if interval.seconds is None:
                raise InvalidInput(
                    "checkpoint_every: the workers of strategy wheel take no steps together; name "
                    "a time, as 60s, or never"
                )
            every_s = interval.seconds
        layout = sha256(self._job.layout.encode()).hexdigest()
        known = every_s, self._server, self._run_id, layout, settings.keep
        if settings.resume is not None:
            earlier = Checkpoints(settings.resume / _CHECKPOINTS, *known)
            logger.info("%s", earlier.resume(self._epochs, self._job.steps_per_epoch))
            self._is_resumed = True
        return Checkpoints(None if interval is None else folder, *known)

    def measure(self) -> Calibrated | None:
        """Wait until all workers have measured; None if not asked for, WorkerLost if none comes."""
        session, job = self._session, self._job
        own: DeviceProfile | None = None
        if session.settings.profile_s:  # the hub's device, with a model of its own
            own = profile_head(job, self._updating)
        self._hub = Hub(
            self._stack,
            session.settings,
            self._run_id,
            job,
            self._server,
            session.progress,
            test=None if session.is_rehearsal else self._test,  # nothing is learnt
            devices=self._devices,
            checkpoints=self._checkpoints,
            epochs=self._epochs,
        )
        self._hub.wait_for_workers()
        if own is not None:
            self._calibrated = calibrate(job.workload, job.spec.config, own, self._hub.profiles)
        return self._calibrated

    def train(self, config: Wheel) -> Outcome:
        """Train, or rehearse; the model's parameters are those of the server in the end.

        `config` is that of the session, whose head was named here. Raises InvalidInput if a loss is
        not finite, WorkerLost if no worker is left.
        """
        hub, job = self._hub, self._job
        assert hub is not None  # `measure` comes first
        num_samples = round(self.samples_per_step * job.spec.num_steps)
        self._session.progress.begin(num_samples, "samples")
        with interruptible(raises_again=True) as hub.interruption:
            try:
                hub.train()
            except Interrupted as error:
                self._save_last()
                raise interrupted(error.num_steps, self._session.folder) from None
            self._save_last()
        return self._outcome(hub)

    def _save_last(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close(self._epochs)

    def _outcome(self, hub: Hub) -> Outcome:
        """Return the outcome of a training or a rehearsal, whose processes end now."""
        wire_nbytes, job, calibrated = hub.close(), self._job, self._calibrated
        spec, is_rehearsal = job.spec, self._session.is_rehearsal
        # Every worker makes an update in a step. Not measured: the steps in which the lanes fall
        # into their turns, and the last turns, which have no forward.
        workers = spec.config.workers
        ends_s = hub.log.update_ends_s[jobs.NUM_WARM_UP * workers - 1 : -jobs.NUM_LAST * workers]
        step_seconds = [end - start for start, end in pairwise(ends_s[::workers])]
        if is_rehearsal and len(step_seconds) < 2:
            lost = "; ".join(hub.lost)
            raise WorkerLost(f"too few steps were rehearsed: {lost or 'workers ended early'}")
        if not hub.log.epochs:
            raise InvalidInput("epochs: no worker was there to the end of the first one")
        names = {
            worker: jobs.device_name("cpu", number)
            if calibrated is None
            else calibrated.machine.devices[number].name
            for number, own in spec.config.workers_by_device.items()
            for worker in own
        }
        devices = dict.fromkeys(names.values())  # each once, in order
        happened = timeline_of(hub.trace, names, messages(job.parts, spec.config))
        if is_rehearsal:
            happened = Timeline(happened.spans, Origin.REHEARSED)
        # Steps of a run that lost workers, or was resumed, do not conform to any plan.
        predicted, faults = None, []
        if calibrated is not None and spec.num_traced and not (hub.lost or self._is_resumed):
            planned = plan(job.workload, calibrated.machine, spec.config, Window(spec.num_traced))
            faults = conform(planned, happened, _SLACK_S)
            predicted = simulate(planned, calibrated.cost)
        trained_s, tokens = hub.log.trained_s, job.recipe.tokens_per_sample
        samples_per_s = (
            spec.batch_size / fmean(step_seconds)
            if is_rehearsal
            else hub.log.num_samples / max(trained_s, 1e-9)
        )
        return Outcome(
            timeline=happened,
            predicted=predicted,
            config=spec.config,
            step_seconds=tuple(step_seconds),
            samples_per_s=samples_per_s,
            tokens_per_s=tokens and tokens * samples_per_s,
            trained_s=None if is_rehearsal else trained_s,
            epochs=() if is_rehearsal else tuple(hub.log.epochs),
            evaluations=tuple(hub.log.evaluations),
            score=score_of(job.recipe),
            faults=tuple(faults),
            lost=tuple(hub.lost),
            peak_memory_bytes=(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,),
            traffic=traffic_of(job, hub),
            wire_nbytes=wire_nbytes,
            device=self._device_names(),
            updates=self._server.updates,
            utilisation=utilisation(happened, devices),
            predicted_utilisation={} if predicted is None else utilisation(predicted, devices),
        )

    def _device_names(self) -> str:
        """Return the products that the hub and the bodies of this machine compute on."""
        used = (self._job.device, *map(torch.device, self._devices))
        return ", ".join(dict.fromkeys(device_of(device).name for device in used))

    def save(self, path: Path) -> None:
        """Write the trained model as safetensors."""
        save_model(self._job.model, str(path))

    def _test(self) -> tuple[float | None, float | None]:
        """Return the model's mean loss and score on the test samples, if there are any."""
        job, recipe = self._job, self._job.recipe
        samples = recipe.test_samples
        if samples is None:
            return None, None
        group = replace(self._session.group, device=job.device)
        loss, score = evaluate(job.model, samples, group, recipe, self._updating.learning)
        size = len(samples)
        return loss / size, None if recipe.score is None else score / size


def _devices(session: TrainingSession) -> tuple[torch.device, tuple[str, ...]]:
    """Return the hub's device and those of the bodies here: GPUs, if there are any.

    Raises InvalidInput if there are fewer GPUs than bodies. The hub takes one that is left over.
    """
    config: Wheel = session.config
    num_bodies, cpu = ceil(config.workers / config.lanes), torch.device("cpu")
    if session.is_rehearsal:  # its bodies sleep most of the time
        return cpu, (str(cpu),) * num_bodies
    if session.settings.bind is not None:
        return first_device(), ()
    found = gpus()
    if 0 < len(found) < num_bodies:
        raise InvalidInput(
            f"workers: {config.workers} in lanes of {config.lanes} need {num_bodies} GPUs, and "
            f"this machine has {len(found)}; take fewer workers or more lanes, or hide the GPUs "
            "with CUDA_VISIBLE_DEVICES= to compute on CPU cores"
        )
    # The hub computes on one of the CPUs beside its workers.
    torch.set_num_threads(num_threads(num_bodies))
    if not found:
        return cpu, (str(cpu),) * num_bodies
    of_hub = len(found) - num_bodies
    bodies = found[min(1, of_hub) :][:num_bodies]
    return found[0] if of_hub else cpu, tuple(map(str, bodies))


def traffic_of(job: jobs.TrainingJob, hub: Hub) -> tuple[Traffic, ...]:
    """Return the bytes of each purpose, and of those between this hub and its child hubs.

    As counted, and of all steps of the run by Table 1's formula; the steps of workers that are
    child hubs are counted apart.
    """
    spec, parts = job.spec, job.parts
    sizes: Counter[int] = Counter()
    for worker in range(spec.config.workers):
        if worker not in hub.children.workers:
            each = list(map(len, jobs.batches_of(spec, worker, job.num_samples)))
            whole, rest = divmod(spec.num_steps, len(each))
            sizes.update(each * whole + each[:rest])
    planned: Counter[Purpose] = Counter()
    for size, times in sizes.items():
        for purpose, message in messages(parts.resized(size), spec.config).items():
            planned[purpose] += times * message.nbytes
    within = tuple(
        Traffic(one.value, hub.heads.nbytes[one], planned[one], one in (*TO_HUB, *FROM_HUB))
        for one in Purpose
    )
    return within + hub.children.traffic.rows(parts)


class ChildResult(Record):
    """The work of a child hub, whose `updates` are those of its own workers.

    `num_pushed` updates of its parent were made of them. `traffic` is that with its workers and its
    own child hubs, `parent_traffic` that with its parent.
    """

    settings: ChildSettings
    model: str
    num_pushed: int
    updates: Updates
    traffic: tuple[Traffic, ...]
    parent_traffic: tuple[Traffic, ...]
    wire_nbytes: tuple[int, int]
    parent_wire_nbytes: tuple[int, int]
    lost: tuple[str, ...]


def serve_child(settings: ChildSettings, progress: Progress) -> ChildResult:
    """Serve this hub's workers until all steps are done, and return what they did.

    Raises InvalidInput if the parent refuses this hub, or its run cannot be served here; WorkerLost
    if the parent is away for longer than the deadline, or no worker is left.
    """
    settings.config()  # refused before the parent is asked
    with connected(settings, (settings.number,), settings.parent_keys) as clients:
        return _serve_workers(settings, clients[settings.number], progress)


def _serve_workers(settings: ChildSettings, client: Client, progress: Progress) -> ChildResult:
    parent_spec = RunSpec.from_json(client.settings)
    job = jobs.child_job(settings, parent_spec)
    spec, config, steps = job.spec, job.spec.config, job.steps_per_epoch
    logger.info(
        "%s: worker %d of the hub at %s, and a hub of %d workers, %d a device",
        *(spec.model, settings.number, settings.connect, settings.workers, config.lanes),
    )
    server = ChildServer(
        job.model,
        job.halves,
        ParentHub(client, jobs.layout_of(parent_spec, job.halves, job.recipe, job.batches)),
        num_workers=config.workers,
        staleness=config.staleness,
        gather=settings.gather or config.workers,
        num_steps=spec.num_steps,
        steps_per_epoch=steps,
        learning=jobs.learning_in(spec, job.recipe),
    )
    with ExitStack() as stack:
        stack.callback(server.close)
        hub = Hub(stack, settings, settings.run, job, server, progress)
        server.wake = hub.rpc.wake
        hub.wait_for_workers()
        server.begin()
        num_samples = job.num_samples * spec.num_steps // (steps * spec.place[1])
        progress.begin(num_samples, "samples")
        hub.train()
        server.finish()
        wire_nbytes = hub.close()
    return ChildResult(
        settings=settings,
        model=spec.model,
        num_pushed=server.parent.traffic.times[HubPurpose.GRADIENTS],
        updates=server.updates,
        traffic=traffic_of(job, hub),
        parent_traffic=server.parent.traffic.rows(job.parts),
        wire_nbytes=wire_nbytes,
        parent_wire_nbytes=(client.sent_nbytes, client.received_nbytes),
        lost=tuple(hub.lost),
    )
