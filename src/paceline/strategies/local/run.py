"""Run strategy local: this process is the hub, which starts its workers or waits for others.

A rehearsal differs by its settings alone: workers' layers take the time of a device, and nothing
is learnt.
"""

import logging
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_model
from torch import Tensor

from paceline.core.balance import apportion
from paceline.core.compare import conform
from paceline.core.errors import Interrupted, InvalidInput, PacelineError, WorkerLost
from paceline.core.outcome import Outcome, SentShare
from paceline.core.plan import Kind
from paceline.core.settings import TrainSettings
from paceline.core.strategy import Calibrated, Window
from paceline.core.timeline import Timeline
from paceline.devices import device_of, gpus
from paceline.exchange.checkpoints import interrupted
from paceline.exchange.loop import score_of
from paceline.exchange.session import TrainingSession
from paceline.exchange.setup import setup_for
from paceline.links.group import boot_id
from paceline.links.interruption import interruptible
from paceline.recipes.named import is_given
from paceline.rpc.connecting import RUN
from paceline.rpc.proportion import Proportions
from paceline.rpc.workers import num_threads
from paceline.strategies.local import checkpoints as saved
from paceline.strategies.local.config import Local
from paceline.strategies.local.exchange import Exchanged
from paceline.strategies.local.gate import Gate
from paceline.strategies.local.hub import Hub
from paceline.strategies.local.log import RunLog
from paceline.strategies.local.measure import calibrate
from paceline.strategies.local.plan import plan, plan_balanced
from paceline.strategies.local.protocol import RunSpec, layout_of
from paceline.strategies.local.relay import Relay
from paceline.strategies.local.trace import NUM_TRACED, timeline_of

logger = logging.getLogger(__name__)
_SLACK_S = 1e-3
_LEAST_MESSAGE_NBYTES = 1 << 23  # for traces and headers
# Folders and addresses of the hub's machine.
_OF_HUB = ("output", "keys", "bind", "resume", "tensorboard", "run")


@contextmanager
def start(session: TrainingSession) -> Iterator["LocalRunner"]:
    """Yield a session's runner, whose processes end with it; InvalidInput if parts do not fit."""
    with ExitStack() as stack:
        yield LocalRunner(session, stack)


class LocalRunner:
    """The hub of a training or a rehearsal."""

    def __init__(self, session: TrainingSession, stack: ExitStack) -> None:
        config: Local = session.config
        settings = session.settings
        if settings.bind is not None and is_given(settings.model):
            raise InvalidInput(
                "model",
                f"{settings.model} is an object of this program, which workers of other machines "
                "cannot import",
                hint="name it as package.module:factory",
            )
        self._session, self._stack, self._config = session, stack, config
        self._devices = _devices(session)
        group = replace(session.group, world_size=config.workers)
        self._setup = setup_for(
            settings.model_copy(update={"balance": None}), group, session.device
        )
        self.workload = self._setup.workload
        self.samples_per_step = self._setup.samples_per_step
        num_steps = sum(self._setup.epoch_steps)
        if config.sync_every > num_steps:
            raise InvalidInput(
                "sync_every", f"{config.sync_every} steps are more than the {num_steps} of the run"
            )
        size = f"{self.workload.num_parameters:,} parameters in {len(self.workload.layers)} layers"
        self.about = (
            f"{settings.model}: {size}; {config.workers} workers, which meet every "
            f"{config.sync_every} steps"
        )
        spec = self._spec(num_steps * config.workers)
        self._exchanged = Exchanged(self._setup.model, config)
        self._buffers: list[Tensor] = [one.detach().clone() for one in self._setup.model.buffers()]
        self._log = self._opened_log()
        self._hub: Hub | None = None
        self._calibrated: Calibrated | None = None
        run = self._run()
        resumed = session.resumed
        if resumed is not None:
            saved.check_fits(resumed, run)
            self._buffers = saved.restored_outer(resumed, self._exchanged.outer, self._buffers)
            saved.restored_log(resumed, self._log)
        is_train = isinstance(settings, TrainSettings)
        self._checkpoints = saved.Checkpoints(
            session.folder,
            settings.checkpoint_interval if isinstance(settings, TrainSettings) else None,
            settings.keep if isinstance(settings, TrainSettings) else 1,
            self._exchanged.outer,
            run,
            resumed,
        )
        stack.callback(self._checkpoints.close)
        assert is_train or resumed is None
        self._hub_spec = spec

    def _spec(self, num_units: int) -> RunSpec:
        settings, session = self._session.settings, self._session
        kept = {
            name: field.default
            for name, field in type(settings).model_fields.items()
            if name in _OF_HUB
        }
        return RunSpec(
            settings=settings.model_copy(update=kept),
            config=self._config,
            num_units=num_units,
            device=session.device,
            boot_id=boot_id(),
            profiles=settings.profile_s > 0,
        )

    def _opened_log(self) -> RunLog:
        settings = self._session.settings
        every = settings.evaluate_every if isinstance(settings, TrainSettings) else None
        return RunLog(self._setup, self._config.workers, self._session.progress, every)

    def _run(self) -> dict[str, Any]:
        """Return what a run must have in common with the one that it goes on from."""
        settings, recipe = self._session.settings, self._setup.recipe
        if not isinstance(settings, TrainSettings) or recipe is None:
            return {}
        return {
            "model": settings.model,
            "num_parameters": self.workload.num_parameters,
            "num_samples": len(recipe.samples),
            "batch_size": settings.batch_size,
            "seed": settings.seed,
            "sync_every": self._config.sync_every,
            "fragments": self._config.fragments,
        }

    def measure(self) -> Calibrated | None:
        """Wait until all workers have measured; None if not asked for, WorkerLost if none comes."""
        session, settings = self._session, self._session.settings
        rounds = saved.restored_rounds(
            session.resumed,
            self._hub_spec.num_units,
            self._config,
            is_balanced=settings.balance is not None,
        )
        self._hub = Hub(
            stack=self._stack,
            settings=settings,
            # Workers of elsewhere are told the name; those of this machine have it to themselves.
            run_id=session.run_id if settings.bind is None else settings.run or RUN,
            spec=self._hub_spec,
            layout=layout_of(self._setup, self._hub_spec),
            relay=partial(
                Relay,
                *(self._config, self._exchanged, self._buffers, rounds, self._gate()),
                *(self._log, self._checkpoints),
            ),
            log=self._log,
            checkpoints=self._checkpoints,
            devices=self._devices,
            threads=num_threads(len(self._devices) or 1, num_others=0),
            max_message_nbytes=self._max_message_nbytes,
        )
        self._stack.push(self._tell_workers)
        self._hub.wait_for_workers()
        if settings.profile_s:
            self._calibrated = calibrate(self.workload, self._config, self._hub.profiles)
        return self._calibrated

    def _gate(self) -> Gate:
        settings, recipe = self._session.settings, self._setup.recipe
        tests = None if recipe is None else recipe.test_samples
        return Gate(
            self._exchanged,
            samples_per_round=self._setup.samples_per_step * self._config.sync_every,
            num_epochs=len(self._setup.epoch_steps),
            num_tests=0 if tests is None else len(tests),
            # Workers of this machine tell no lies.
            proportions=None if settings.bind is None else Proportions(),
        )

    def _tell_workers(self, kind: type[BaseException] | None, error: object, _: object) -> None:
        """Tell workers of elsewhere why the run does not begin, or ends."""
        if self._hub is not None and kind is not None and issubclass(kind, PacelineError):
            self._hub.dismiss(str(error))

    @property
    def speeds(self) -> tuple[float, ...]:
        """Samples a second of each worker by itself, as measured; empty if one has not measured."""
        hub, count = self._hub, self._config.workers
        if hub is None or set(range(count)) - hub.profiles.keys():
            return ()
        own = self.samples_per_step / count
        return tuple(own / hub.profiles[worker].step_s for worker in range(count))

    @property
    def samples_per_exchange(self) -> float:
        """The samples of a round over all workers."""
        return self.samples_per_step * self._config.sync_every

    @property
    def _max_message_nbytes(self) -> int:
        """The bytes that no message of the run exceeds."""
        outer, workers = self._exchanged.outer, self._config.workers
        # The parts of all workers, or the group's state with a worker's own: parameters, and what
        # its optimizer keeps of them.
        biggest = max(workers, 6) * outer.nbytes + sum(one.nbytes for one in self._buffers)
        return _LEAST_MESSAGE_NBYTES + biggest

    def train(self, config: Local) -> Outcome:
        """Train, or rehearse; the model's parameters are the group's in the end.

        Raises InvalidInput if a loss is not finite, WorkerLost if no worker is left.
        """
        hub = self._hub
        assert hub is not None  # `measure` comes first
        self._session.progress.begin(sum(self._setup.epoch_steps), "steps")
        self._session.progress.advance(self._log.num_steps)
        with interruptible(raises_again=True) as hub.interruption:
            try:
                hub.train()
            except Interrupted as error:
                self._checkpoints.close()
                folder = self._session.folder
                raise interrupted(hub.interruption, error.num_steps, folder) from None
        outer = self._exchanged.outer
        for number, fragment in enumerate(self._exchanged.fragments):
            outer.load_into(number, fragment)
        with torch.no_grad():
            for buffer, found in zip(self._setup.model.buffers(), hub.relay.buffers, strict=True):
                buffer.copy_(found)
        return self._outcome(hub)

    def _outcome(self, hub: Hub) -> Outcome:
        """Return the outcome of a training or a rehearsal, whose processes end now."""
        wire_nbytes, log, calibrated = hub.close(), self._log, self._calibrated
        config, is_rehearsal = self._config, self._session.is_rehearsal
        step_seconds = log.step_seconds
        if not step_seconds and is_rehearsal:
            lost = "; ".join(hub.lost)
            raise WorkerLost(f"too few rounds were rehearsed: {lost or 'workers ended early'}")
        if calibrated is None:
            names = {worker: f"cpu{worker}" for worker in range(config.workers)}
        else:
            names = {i: one.name for i, one in enumerate(calibrated.machine.devices)}
        origin = self._session.origin
        traced = hub.traces.values()
        is_balanced = self._session.settings.balance is not None
        happened = timeline_of(traced, hub.relay.times, names, config.fragments, NUM_TRACED, origin)
        faults: list[str] = []
        if calibrated is not None and not hub.lost and self._session.resumed is None:
            whole = _whole_rounds(happened, config.workers)
            if whole.spans:
                num_rounds = 1 + max(span.step for span in whole.spans)
                planned = (plan_balanced if is_balanced else plan)(
                    self.workload, calibrated.machine, config, Window(num_rounds)
                )
                faults = conform(planned, whole, _SLACK_S)
        trained_s = log.trained_s
        samples_per_s = self.samples_per_step / median(
            step_seconds or (trained_s / max(1, log.num_steps),)
        )
        tokens = self._setup.recipe.tokens_per_sample if self._setup.recipe else None
        return Outcome(
            timeline=happened,
            config=config,
            step_seconds=step_seconds,
            samples_per_s=samples_per_s,
            tokens_per_s=tokens and tokens * samples_per_s,
            trained_s=None if is_rehearsal else trained_s,
            epochs=tuple(log.epochs),
            evaluations=tuple(log.evaluations),
            score=score_of(self._setup.recipe),
            faults=tuple(faults),
            lost=tuple(hub.lost),
            shares=self._shares() if is_balanced and log.samples_of else None,
            peak_memory_bytes=(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,),
            wire_nbytes=wire_nbytes,
            sent_share=SentShare.of(config.codec, self._exchanged.decoded.share),
            device=", ".join(
                dict.fromkeys(device_of(torch.device(one)).name for one in self._devices)
            )
            or None,
        )

    def _shares(self) -> tuple[int, ...]:
        """Return the samples of each worker in a step of the run, on average."""
        taken = [self._log.samples_of[worker] for worker in range(self._config.workers)]
        return apportion(round(self.samples_per_step), taken)

    def save(self, path: Path) -> None:
        """Write the trained model as safetensors."""
        save_model(self._setup.model, str(path))


def _whole_rounds(happened: Timeline, num_workers: int) -> Timeline:
    """Return the spans without those of the last round, unless each worker has trained in it.

    In a plan each does; but the last round has what is left of the samples, which may be nothing
    for the slowest worker.
    """
    last = max((span.step for span in happened.spans), default=0)
    ending = [span for span in happened.spans if span.step == last]
    trained = {span.worker for span in ending if span.kind is Kind.TRAIN}
    if len(trained) == num_workers:
        return happened
    spans = (span for span in happened.spans if span.step < last)
    return Timeline(spans, happened.origin)


def _devices(session: TrainingSession) -> tuple[str, ...]:
    """Return the devices of the workers of this machine: GPUs, if there are any.

    Raises InvalidInput if there are fewer GPUs than workers.
    """
    config: Local = session.config
    if session.settings.bind is not None:
        return ()
    found = () if session.is_rehearsal else gpus()
    if 0 < len(found) < config.workers:
        raise InvalidInput(
            "workers",
            f"{config.workers} need {config.workers} GPUs, and this machine has {len(found)}",
            hint="take fewer, or hide the GPUs with CUDA_VISIBLE_DEVICES= to compute on CPU cores",
        )
    return tuple(map(str, found[: config.workers])) if found else ("cpu",) * config.workers
