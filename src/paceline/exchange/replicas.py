"""Run data-parallel strategies: each rank trains a replica, and gradients are averaged."""

import resource
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from safetensors.torch import save_model
from torch import nn

from paceline.core.balance import Balance
from paceline.core.chunks import ChunkTuner, PredictedSearch, RuntimeSearch, candidates
from paceline.core.compare import conform
from paceline.core.outcome import ChunkTrial, Outcome, SentShare
from paceline.core.plan import COMMUNICATION, Plan
from paceline.core.settings import RehearseSettings
from paceline.core.simulate import period
from paceline.core.strategy import (
    PricedMachine,
    Prober,
    Strategy,
    Window,
    exchange_name,
    gradient_codec,
)
from paceline.core.timeline import Timeline
from paceline.core.workload import Workload
from paceline.exchange.balanced import Balanced
from paceline.exchange.loop import Trained, score_of, train
from paceline.exchange.profile import Profile, beside_copies, profile, with_idle_cores
from paceline.exchange.replica import ModelReplica, Probe
from paceline.exchange.session import TrainingSession
from paceline.exchange.setup import TrainingSetup, setup_of
from paceline.exchange.step import train_step
from paceline.links.clock import clock_for
from paceline.links.group import Group
from paceline.record.merge import gather_timeline
from paceline.record.recorder import Recorder
from paceline.training.data.sampler import BalancedSampler
from paceline.training.models.paced import Stretched

# Tolerance when recorded times are compared with a plan: hooks of the same gradient run one after
# another, so their times differ slightly.
SLACK_S = 1e-3
# Balanced batch sizes must be stable before a rehearsal: check them every _INTERVAL steps, at most
# _MOST_ROUNDS times.
_INTERVAL, _MOST_ROUNDS = 10, 10
_PERIOD_STEPS = 8  # steps simulated to predict a step time, as in planner.forecast
Replicate = Callable[..., ModelReplica]  # called as (module, config, group, *, tuner=...)


@contextmanager
def start(session: TrainingSession) -> Iterator["ReplicaRunner"]:
    """Yield a `ReplicaRunner`, which calls `replica` of the strategy's module to wrap the model."""
    yield ReplicaRunner(session, session.strategy.runner().replica)


def prober(strategy: Strategy, config: Any, group: Group) -> Prober:
    """Return a factory of probes, each of which times the exchange of `strategy`."""
    replica = strategy.runner().replica
    ends_together = strategy.running is None or strategy.running.ends_together
    make = partial(
        Probe,
        device=group.device,
        replicate=lambda module: replica(module, config, group),
        codec=gradient_codec(config),
        barrier=None if ends_together else group.barrier,
    )
    return Prober(strategy, config, make)


class ReplicaRunner:
    """Profiles, and then trains or rehearses, this rank's replica of the model."""

    def __init__(self, session: TrainingSession, replicate: Replicate) -> None:
        self._session, self._replicate = session, replicate
        self.setup = setup_of(session)  # this rank's model, data and steps
        self.workload = self.setup.workload  # layers and costs of this rank's part of a step
        self.samples_per_step = self.setup.samples_per_step  # all workers together; mean over steps
        self.about = about(session, self.workload)
        self.profiled: Profile | None = None
        self.with_equal_shares: Profile | None = None  # profile for equal batch sizes

    def profile(self, beside: Iterable[tuple[Strategy, Any]]) -> Profile:
        """Time the model's layers, and the exchange of each (strategy, config) in `beside`."""
        session, setup = self._session, self.setup
        probers = {
            exchange_name(one.name, config): prober(one, config, session.group)
            for one, config in beside
        }
        found = profile(setup, session.group, session.settings.profile_s, probers)
        settings, self.with_equal_shares = session.settings, found
        if isinstance(settings, RehearseSettings) and setup.times is None:
            devices = enumerate(found.machine.devices)
            found = found.slowed({one.name: settings.slowdown_of(rank) for rank, one in devices})
            self.with_equal_shares = found
        if setup.sampler is not None:
            self._balance(setup.sampler)
            if session.is_rehearsal:
                found = found.balanced(setup.sampler.shares)
        self.profiled = found
        return found

    def rank_seconds(self) -> list[float]:
        """Return the seconds that each rank alone would need to compute a step's whole batch."""
        assert self.with_equal_shares is not None
        factor = self._session.settings.batch_size / self.workload.batch_size
        return self.with_equal_shares.rank_seconds(factor)

    def _balance(self, sampler: BalancedSampler) -> None:
        """Set batch sizes by the ranks' profiled speeds, so that the first steps are fast."""
        balance = Balance(sampler.batch_size, sampler.world_size, sampler.most)
        shares = balance.record(self.rank_seconds())  # equal if speeds are equal up to noise
        # use rank 0's batch sizes on all ranks, because the ranks' profiles may differ
        sampler.update(self._session.group.gather(shares)[0])

    def measure(self) -> PricedMachine:
        """Time the layers and this strategy's exchange; return machine and cost model."""
        self.profile([(self._session.strategy, self._session.config)])
        return self.calibrated(self._session.strategy, self._session.config)

    def calibrated(self, strategy: Strategy, config: Any) -> PricedMachine:
        """Return the profiled machine and cost model, adapted to predict steps of `strategy`."""
        assert self.profiled is not None
        machine, cost = self.profiled.calibrated(strategy, config)
        if self._session.is_rehearsal:
            machine = with_idle_cores(machine)
        if self.setup.times is not None:
            plan = strategy.planning.plan(self.workload, machine, config, Window(1))
            cost = beside_copies(plan, cost)
        return PricedMachine(machine, cost)

    def train(self, config: Any) -> Outcome:
        """Train or rehearse with `config`; if `config.chunk` names a search, run it, too."""
        session, tuner = self._session, self._tuner(config)
        tuning = {} if tuner is None else {"tuner": tuner}
        return self.train_with(
            lambda module: self._replicate(module, config, session.group, **tuning),
            lambda: (session.strategy, config),
            tuner,
        )

    def train_with(
        self,
        replicate: Callable[[nn.Module], ModelReplica],
        used: Callable[[], tuple[Strategy, Any]],
        tuner: ChunkTuner | None = None,
    ) -> Outcome:
        """Train the model wrapped by `replicate`; `used` returns the strategy and config in use."""
        session, setup, group = self._session, self.setup, self._session.group
        assert self.profiled is not None
        device = self.profiled.machine.devices[group.rank].name
        recorder = Recorder(clock_for(group.device), device, group.rank)
        # seed again after the profile, and differently by rank, so that dropout masks differ
        torch.manual_seed(getattr(session.settings, "seed", 0) + group.rank)
        stretched = None if setup.factor is None else Stretched(setup.model, setup.factor)
        replica = replicate(setup.model)
        if setup.sampler is not None:
            replica = Balanced(replica, setup.model, group, setup.sampler, weighs=False)
        if isinstance(session.settings, RehearseSettings):
            self._settle(replica, recorder, tuner)
        trained = self._trained(replica, recorder, used()[1])
        strategy, config = used()
        trials: tuple[ChunkTrial, ...] = ()
        if tuner is not None:
            chosen, tried = group.gather([tuner.chunk, tuner.trials])[0]
            predicted = self._predicted(strategy, config, [chunk for chunk, _, _ in tried])
            trials = tuple(ChunkTrial(chunk, predicted[chunk], own) for chunk, _, own in tried)
            config = replace(config, chunk=chosen)
        if stretched is not None:
            stretched.remove()
        machine, _ = self.calibrated(strategy, config)
        return outcome_of(
            session,
            setup,
            trained,
            partial(strategy.planning.plan, self.workload, machine, config),
            config=config,
            shares=None if setup.sampler is None else setup.sampler.shares,
            trials=trials,
        )

    def _trained(self, replica: ModelReplica, recorder: Recorder, config: Any) -> Trained:
        """Run the loop of synchronous steps; a subclass may override it with another loop."""
        return train(self._session, self.setup, recorder, replica)

    def save(self, path: Path) -> None:
        """Write rank 0's model to `path` in safetensors format; other ranks do nothing."""
        if self._session.group.rank == 0:
            save_model(self.setup.model, str(path))

    def _settle(self, replica: ModelReplica, recorder: Recorder, tuner: ChunkTuner | None) -> None:
        """Take untimed steps until the chunk search has ended and balanced batches are stable."""
        setup, group = self.setup, self._session.group
        optimizer, source = setup.optimizer(setup.model), setup.source(0)

        def take(number: int) -> None:
            for _ in range(number):
                train_step(replica, optimizer, source, recorder, setup.learning)

        if tuner is not None:
            take(1)  # the first step determines the order in which gradients become ready
            while not group.gather(tuner.done)[0]:  # only rank 0's tuner has measured times
                take(tuner.interval)
        if (sampler := setup.sampler) is not None:
            for _ in range(_MOST_ROUNDS):
                before = sampler.shares
                take(_INTERVAL)
                if sampler.shares == before:
                    break
        recorder.step_ends()  # returns and clears the steps' times, which are not used

    def _tuner(self, config: Any) -> ChunkTuner | None:
        """Return a search for the number of layers per chunk, if `config.chunk` requests one."""
        num_layers, chunk = len(self.workload.layers), getattr(config, "chunk", None)
        if not isinstance(chunk, str) or self._session.group.world_size == 1:
            return None
        if chunk == "search":
            return RuntimeSearch(
                num_layers, config.search_step, config.search_range, config.interval
            )
        predicted = self._predicted(self._session.strategy, config, candidates(num_layers))
        return PredictedSearch(predicted, config.interval)

    def _predicted(
        self, strategy: Strategy, config: Any, chunks: Sequence[int]
    ) -> dict[int, float]:
        """Return rank 0's prediction of the step time for each chunk size; collective."""
        group = self._session.group

        def step_s(chunk: int) -> float:
            one = replace(config, chunk=chunk)
            machine, cost = self.calibrated(strategy, one)
            plan = partial(strategy.planning.plan, self.workload, machine, one)
            return period(lambda num_steps: plan(Window(num_steps)), cost, _PERIOD_STEPS)

        # `gather` after each prediction: if other ranks waited for all of them, they would time out
        return {
            chunk: group.gather(step_s(chunk) if group.rank == 0 else None)[0] for chunk in chunks
        }


def outcome_of(
    session: TrainingSession,
    setup: TrainingSetup,
    trained: Trained,
    plan: Callable[[Window], Plan],
    **known: Any,
) -> Outcome:
    """Create a run's outcome from all ranks' measurements; collective.

    `plan(window)`: returns the planned tasks of some steps, to compare with the traced steps.
    `known`: fields of the outcome that the caller knows.
    """
    group = session.group
    timeline = gather_timeline(trained.spans, trained.offset, group, session.origin)
    # times of two ranks are compared, so the errors of both clocks' offsets add up
    slack_s = SLACK_S + 2 * max(group.gather(trained.offset.error_s))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    # no step is taken if a run is resumed after its last step
    step_s = median(trained.step_seconds) if trained.step_seconds else None
    samples_per_s = setup.samples_per_step / step_s if step_s else 0.0
    tokens = setup.recipe.tokens_per_sample if setup.recipe else None
    # `sent_share` is None on a rank that encodes nothing: often only one rank per host encodes
    shares = [one for one in group.gather(trained.sent_share) if one is not None]
    codec = gradient_codec(known.get("config"))
    return Outcome(
        timeline=timeline,
        step_seconds=trained.step_seconds,
        samples_per_s=samples_per_s,
        tokens_per_s=tokens and tokens * samples_per_s,
        epochs=trained.epochs,
        evaluations=trained.evaluations,
        score=score_of(setup.recipe),
        faults=_faults(timeline, plan, slack_s, is_alone=group.exchanges_alone),
        peak_memory_bytes=tuple(group.gather(peak)),
        sent_share=SentShare.of(codec, fmean(shares)) if shares else None,
        **known,
    )


def _faults(
    timeline: Timeline, plan: Callable[[Window], Plan], slack_s: float, *, is_alone: bool
) -> tuple[str, ...]:
    """Return the differences between the traced steps and their plan."""
    num_traced = 1 + max((span.step for span in timeline.spans), default=-1)
    if not num_traced:
        return ()
    kept = timeline.spans
    if is_alone:  # a single worker may record communication, but its plan has none
        kept = tuple(span for span in kept if span.kind not in COMMUNICATION)
    return tuple(conform(plan(Window(num_traced)), Timeline(kept, timeline.origin), slack_s))


def about(session: TrainingSession, workload: Workload) -> str:
    """Describe the model and how long its profile takes, in one line for the user."""
    settings = session.settings
    size = f"{workload.num_parameters:,} parameters in {len(workload.layers)} layers"
    if session.is_rehearsal:
        return (
            f"{settings.model}: {size}, on {settings.workers} workers {devices_of(session)}; "
            "measuring the machine for the rehearsal"
        )
    return f"{settings.model}: {size}; profiling for {settings.profile_s:g} s"


def devices_of(session: TrainingSession) -> str:
    """Describe how a rehearsal emulates devices, such as "paced as k40-gigabit/gpu0"."""
    settings = session.settings
    if session.device is not None:
        return f"paced as {session.device.label}"
    if isinstance(settings, RehearseSettings) and settings.slowdown is not None:
        return f"slowed {', '.join(f'{times:g}' for times in settings.slowdown)} times"
    return ""
