"""Run strategy wheel: this process is the hub, which starts workers or waits for them.

In a rehearsal, layers and optimizer sleep instead of computing, the data are zeros, and the model
is not tested. If the rehearsal has child hubs, this process is the root of the tree of hubs, and
the child hubs are its workers (`child`).
"""

import logging
import resource
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import fmean

import torch
from safetensors.torch import save_model

from paceline.core.compare import conform
from paceline.core.errors import InvalidInput, WorkerLost
from paceline.core.outcome import Epoch, Outcome
from paceline.core.settings import RehearseSettings, TrainSettings
from paceline.core.simulate import simulate
from paceline.core.strategy import PricedMachine, Window
from paceline.core.timeline import Timeline
from paceline.core.wire_format import Purpose
from paceline.exchange.checkpoints import Saver, State, interrupted
from paceline.exchange.learner import tested
from paceline.exchange.loop import score_of
from paceline.exchange.session import TrainingSession
from paceline.links.devices import device_of, first_device, gpus
from paceline.links.interruption import interruptible
from paceline.measure.device_profile import device_name
from paceline.record.worker_trace import timeline_of, utilisation
from paceline.rpc.connecting import RUN
from paceline.rpc.workers import num_threads
from paceline.strategies.wheel import job as jobs
from paceline.strategies.wheel.checkpoint import load, state_of
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.epochs import EpochLog, Test
from paceline.strategies.wheel.hub import Hub
from paceline.strategies.wheel.measure import calibrate
from paceline.strategies.wheel.plan import plan
from paceline.strategies.wheel.protocol import check_codecs
from paceline.strategies.wheel.server import ParameterServer
from paceline.strategies.wheel.split import TO_HUB, messages

logger = logging.getLogger(__name__)
_SLACK_S = 1e-3  # tolerance when comparing run and plan: hooks record the end of a layer late


@contextmanager
def start(session: TrainingSession) -> Iterator["WheelRunner"]:
    """Yield the runner of a session; its worker processes end with the `with` block."""
    with ExitStack() as stack:
        yield WheelRunner(session, stack)


class WheelRunner:
    """Runs the hub of a training run or a rehearsal, and collects the results."""

    def __init__(self, session: TrainingSession, stack: ExitStack) -> None:
        session.config.check_tree()
        self._session, settings = session, session.settings
        device, self._devices = _devices(session)
        test: Test | None = None  # a rehearsal does not test
        every: int | None = None
        if isinstance(settings, RehearseSettings):
            job = jobs.rehearsal_job(session, settings)
        else:
            _check_trained(session.config, settings)
            job = jobs.training_job(session, settings, device)
            test, every = self._test, settings.evaluate_every
        self._job, self.workload = job, job.workload
        self._config = job.spec.tree or job.spec.config  # unlike session.config, has `head` set
        self.samples_per_step = len(job.recipe.samples) / job.steps_per_epoch
        self.about = _about(session, job)
        check_codecs(job.spec.config, job.halves.body_parameters[0].dtype)
        optimizer, epochs = job.optimizer(job.model), list[Epoch]()
        self._server = ParameterServer(
            *(job.model, job.halves, optimizer),
            **jobs.server_options(job),
            # 1 in a rehearsal, because its optimizer has no learning rate to divide by this number.
            updates_per_step=1 if job.spec.pace else job.spec.config.workers,
            schedule=job.schedule(optimizer),
        )
        if session.resumed is not None:
            progress = load(session.resumed, self._server, job.layout)
            epochs = progress.epochs_over(job.steps_per_epoch)
        log = EpochLog(job, session.progress, test, every, epochs)
        # Remote workers get the run's name from users; workers of this machine get a unique name.
        run_id = session.run_id if settings.listen is None else settings.run_name or RUN
        self._hub = Hub(stack, settings, run_id, job, self._server, log, devices=self._devices)
        self._calibrated: PricedMachine | None = None

    def measure(self) -> PricedMachine | None:
        """Wait for workers; return the measured machine, or None if a device was not measured."""
        own, of_workers = self._hub.wait_for_workers(), self._hub.answers.profiles
        if own is not None:
            measured = self._job.workload, self._config, own, of_workers
            self._calibrated = calibrate(*measured, is_paced=self._session.is_rehearsal)
        return self._calibrated

    def train(self, config: Wheel) -> Outcome:
        """Train or rehearse with the session's configuration; the argument `config` is ignored."""
        hub, session, settings = self._hub, self._session, self._session.settings
        with interruptible(raises_again=True) as interruption:
            if not isinstance(settings, TrainSettings):

                def stop_if_asked() -> None:
                    if interruption.requested:
                        raise interrupted(interruption, self._server.version, None)

                hub.train(stop_if_asked)
                return self._outcome()
            own = session.group, session.folder, settings, interruption, self._server.version
            with closing(Saver(*own)) as saver:
                hub.train(lambda: saver.after(self._server.version, self._state))
        return self._outcome()

    def _state(self, num_updates: int) -> State:
        return state_of(self._server, self._job.layout, self._hub.log.epochs)

    def _outcome(self) -> Outcome:
        """End the worker processes, and return the results and measurements of the run."""
        job, hub, log, trained_s = self._job, self._hub, self._hub.log, self._hub.log.trained_s
        spec, is_rehearsal, wire_nbytes = job.spec, self._session.is_rehearsal, hub.close()
        step_seconds = self._step_seconds()
        if is_rehearsal and len(step_seconds) < 2:
            raise WorkerLost(f"rehearsed too few steps: {self._why_too_few()}")
        if not log.epochs:
            raise WorkerLost("no worker has completed the first epoch")
        happened, devices = self._happened()
        predicted, faults = self._compared(happened)
        samples_per_s = (
            spec.batch_size / fmean(step_seconds)
            if is_rehearsal
            else log.num_samples / max(trained_s, 1e-9)
        )
        tokens, used = job.recipe.tokens_per_sample, (job.device, *map(torch.device, self._devices))
        return Outcome(
            timeline=happened,
            predicted=predicted,
            config=self._config,
            step_seconds=tuple(step_seconds),
            samples_per_s=samples_per_s,
            tokens_per_s=tokens and tokens * samples_per_s,
            trained_s=None if is_rehearsal else trained_s,
            epochs=() if is_rehearsal else tuple(log.epochs),
            evaluations=tuple(log.evaluations),
            score=score_of(job.recipe),
            # Child hubs record no traces of their workers, so run and plan cannot be compared.
            faults=None if spec.tree else tuple(faults),
            lost=tuple(hub.group.lost),
            peak_memory_bytes=(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,),
            traffic=hub.answers.traffic(),
            sent_share=hub.answers.sent_share(),
            wire_nbytes=wire_nbytes,
            device=", ".join(dict.fromkeys(device_of(one).name for one in used)),
            updates=self._server.updates,
            utilisation=utilisation(happened, devices),
            predicted_utilisation={} if predicted is None else utilisation(predicted, devices),
        )

    def _why_too_few(self) -> str:
        tree, lost = self._job.spec.tree, self._hub.group.lost
        if lost or tree is None:
            return "; ".join(lost) or "workers ended early"
        return (
            f"the parent was slower than the child hubs, whose means had more than {tree.gathered} "
            "steps; increase --steps"
        )

    def _happened(self) -> tuple[Timeline, list[str]]:
        """Return the timeline of the traced steps, and the names of the workers' devices."""
        job, calibrated = self._job, self._calibrated
        config = job.spec.config
        names = {
            worker: device_name("cpu", number)
            if calibrated is None
            else calibrated.machine.devices[number].name
            for number, own in config.workers_by_device.items()
            for worker in own
        }
        sent = messages(job.parts, config)
        labels = sent[Purpose.LABELS].nbytes
        label_share = labels / (labels + sent[Purpose.ACTIVATIONS].nbytes)
        traced = timeline_of(self._hub.answers.trace, names, TO_HUB, label_share)
        return Timeline(traced.spans, self._session.origin), list(dict.fromkeys(names.values()))

    def _compared(self, happened: Timeline) -> tuple[Timeline | None, list[str]]:
        """Return the predicted timeline, if any, and the differences between run and plan."""
        job, spec, calibrated = self._job, self._job.spec, self._calibrated
        # Plans do not model lost workers and resumed runs.
        is_whole = not self._hub.group.lost and self._session.resumed is None
        if calibrated is None or spec.tree is not None or not spec.num_traced or not is_whole:
            return None, []
        planned = plan(job.workload, calibrated.machine, spec.config, Window(spec.num_traced))
        return simulate(planned, calibrated.cost), conform(planned, happened, _SLACK_S)

    def _step_seconds(self) -> list[float]:
        """Return the seconds of each measured step, which consists of one update per worker.

        The first steps, which are irregular, and the last step, which no forward pass follows, are
        not measured. In a tree of hubs, an update may contain several steps or part of a step, so
        the seconds are scaled to the number of samples in a batch.
        """
        spec, log = self._job.spec, self._hub.log
        workers = spec.config.workers
        measured = slice(jobs.NUM_WARM_UP * workers - 1, -jobs.NUM_LAST * workers)
        steps = [
            (end_s - start_s, after - before)
            for (start_s, before), (end_s, after) in pairwise(log.updates[measured][::workers])
        ]
        is_tree = spec.tree is not None
        return [seconds * spec.batch_size / n if is_tree else seconds for seconds, n in steps]

    def save(self, path: Path) -> None:
        """Write the trained model as safetensors."""
        save_model(self._job.model, str(path))

    def _test(self) -> tuple[float | None, float | None]:
        job = self._job
        group = replace(self._session.group, device=job.device)
        # If the server is in main memory, test a copy of the model on the device.
        model = job.model if job.kept_on == job.device else deepcopy(job.model).to(job.device)
        return tested(model, group, job.recipe, job.learning)


def _about(session: TrainingSession, job: jobs.TrainingJob) -> str:
    config: Wheel = session.config
    return (
        f"{session.settings.model}: {job.workload.num_parameters:,} parameters in "
        f"{len(job.workload.layers)} layers; {config.workers} workers, {config.lanes} a device"
        + (f", of {config.child_hubs} child hubs" if config.child_hubs else "")
        + (f", paced as {session.device.label}" if session.device is not None else "")
    )


def _check_trained(config: Wheel, settings: TrainSettings) -> None:
    """Raise InvalidInput if `child_hubs` is set, or if the checkpoint interval is in steps."""
    if config.child_hubs:
        hint = "start each child hub with paceline hub --parent"
        got = config.child_hubs
        raise InvalidInput("child_hubs", "cannot be used in training", got=got, hint=hint)
    interval = settings.checkpoint_interval
    if interval is not None and interval.seconds is None:
        problem = "must be a time such as 60s, or never: wheel's workers have no common steps"
        raise InvalidInput("checkpoint_every", problem, got=settings.checkpoint_every)


def _devices(session: TrainingSession) -> tuple[torch.device, tuple[str, ...]]:
    """Return the hub's device, and the devices of its workers on this machine.

    Workers use GPUs, if there are any. The hub uses a GPU that no worker uses, otherwise the CPU.
    """
    config: Wheel = session.config
    num_bodies, cpu = ceil(config.workers / config.lanes), torch.device("cpu")
    if session.is_rehearsal:  # CPUs suffice, because the workers mostly sleep
        return cpu, (str(cpu),) * num_bodies
    if session.settings.listen is not None:
        return first_device(), ()
    found = gpus()
    if 0 < len(found) < num_bodies:
        most, hint = config.lanes * len(found), "or set CUDA_VISIBLE_DEVICES= to use CPUs"
        problem = f"must be at most {most} with lanes={config.lanes} on {len(found)} GPUs"
        raise InvalidInput("workers", problem, got=config.workers, hint=hint)
    # Divide the CPU cores, because the hub computes at the same time as its workers.
    torch.set_num_threads(num_threads(num_bodies))
    if not found:
        return cpu, (str(cpu),) * num_bodies
    of_hub = len(found) - num_bodies
    bodies = found[min(1, of_hub) :][:num_bodies]
    return found[0] if of_hub else cpu, tuple(map(str, bodies))
