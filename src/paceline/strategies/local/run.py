"""Run strategy local: replicas take steps alone, and average their changes once per round."""

from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import save_model
from torch import nn

from paceline.core.cost import compute_lane, exchange_lane
from paceline.core.machine import Device, DeviceKind
from paceline.core.outcome import Outcome
from paceline.core.plan import Kind, Lane, Plan, Resource
from paceline.core.strategy import Strategy
from paceline.core.timeline import Span
from paceline.exchange.compressed import Compression
from paceline.exchange.loop import Trained, train
from paceline.exchange.profile import Profile
from paceline.exchange.replica import Method, ModelReplica, SingleReplica
from paceline.exchange.replicas import ReplicaRunner, outcome_of
from paceline.exchange.running_exchange import ExchangeTimes
from paceline.exchange.session import TrainingSession
from paceline.exchange.setup import setup_of
from paceline.exchange.synchronized import Synchronized
from paceline.links.clock import clock_for
from paceline.links.devices import device_of
from paceline.links.group import Group
from paceline.record.merge import clock_offset
from paceline.record.recorder import Recorder
from paceline.strategies.local.config import Local
from paceline.strategies.local.learner import LocalModel
from paceline.strategies.local.plan import turns

_MOST_ROUNDS = 5  # maximum number of rounds in a trace


@contextmanager
def start(session: TrainingSession) -> Iterator["LocalRunner | ElasticRunner"]:
    """Yield an ElasticRunner for an elastic session, otherwise a LocalRunner."""
    yield LocalRunner(session, replica) if session.elastic is None else ElasticRunner(session)


def replica(module: nn.Module, config: Local, group: Group) -> ModelReplica:
    """Wrap the module for the profile, which measures an all-reduce of the gradients."""
    compression = None if config.codec is None else Compression(config.codec)
    device_ids = [group.device] if device_of(group.device).is_asynchronous else None
    method = Method("allreduce", compression=compression)
    return Synchronized(module, method, group=group, device_ids=device_ids)


class LocalRunner(ReplicaRunner):
    """Trains this rank's replica, or rehearses the training (layers then only sleep)."""

    def profile(self, beside: Iterable[tuple[Strategy, Any]]) -> Profile:
        """Time layers, and the exchange of each (strategy, config) in `beside`.

        The exchange of strategy local is measured for the whole model, without fragments and delay.
        """
        whole = [
            (one, replace(config, fragments=1, delay=0) if isinstance(config, Local) else config)
            for one, config in beside
        ]
        return super().profile(whole)

    def train(self, config: Local) -> Outcome:
        """Train, or rehearse the training, with this configuration."""
        return self.train_with(SingleReplica, lambda: (self._session.strategy, config))

    def _trained(self, replica: ModelReplica, recorder: Recorder, config: Local) -> Trained:
        session = self._session
        model = LocalModel(session, config, self.setup, recorder, replica)
        trained = train(session, self.setup, recorder, model, model.learner)
        assert self.profiled is not None
        device = self.profiled.machine.devices[session.group.rank]
        spans = tuple(spans_of(tuple(model.updates.log.latest), config, device, session.group.rank))
        # The last step of a round includes the exchange, so report the mean step time per round.
        seconds = _means(trained.step_seconds, config.sync_every)
        offset = clock_offset(session.group)
        return replace(trained, spans=spans, offset=offset, step_seconds=seconds)


def _means(seconds: Sequence[float], count: int) -> tuple[float, ...]:
    """Return the mean of each group of `count` numbers; ignore an incomplete last group."""
    count = max(1, min(count, len(seconds)))
    whole = range(0, len(seconds) - count + 1, count)
    return tuple(fmean(seconds[first : first + count]) for first in whole)


class ElasticRunner:
    """Trains a worker that may join and leave at any time, without profiling or planning."""

    def __init__(self, session: TrainingSession) -> None:
        assert session.elastic is not None
        self._session, self._elastic = session, session.elastic
        number, num_workers, _ = session.elastic
        # Use the worker's number as a rank, but only to select the worker's share of each batch:
        # messages go through torchft.
        as_rank = replace(session.group, rank=number, world_size=num_workers)
        self.setup = setup_of(replace(session, group=as_rank))
        self.workload = self.setup.workload
        self.samples_per_step = self.setup.samples_per_step
        size = f"{self.workload.num_parameters:,} parameters in {len(self.workload.layers)} layers"
        self.about = (
            f"{session.settings.model}: {size}; {num_workers} elastic workers, rounds of "
            f"{session.config.sync_every} steps"
        )

    def measure(self) -> None:
        """Do nothing, because a profile needs all workers, and others may already be training."""

    def train(self, config: Local) -> Outcome:
        """Train from the step at which this worker joins until the run's last step."""
        session, (number, _, manager) = self._session, self._elastic
        recorder = Recorder(clock_for(session.group.device), "", 0)
        torch.manual_seed(getattr(session.settings, "seed", 0) + number)
        replica = SingleReplica(self.setup.model)
        model = LocalModel(session, config, self.setup, recorder, replica, manager)
        # Do not report epochs that had ended when this worker joined.
        joined = bisect(list(accumulate(self.setup.epoch_steps)), model.updates.num_steps)
        trained = train(session, self.setup, recorder, model, model.learner)
        trained = replace(trained, spans=(), epochs=trained.epochs[joined:])
        return outcome_of(session, self.setup, trained, lambda window: Plan(()), config=config)

    def save(self, path: Path) -> None:
        """Write the model as safetensors, if this worker writes the run's files."""
        if self._session.writes_files:
            save_model(self.setup.model, str(path))


def spans_of(
    times: Sequence[ExchangeTimes], config: Local, device: Device, worker: int
) -> Iterator[Span]:
    """Yield the spans of up to five rounds, the last complete ones, numbered from 0.

    `times`: the times of each fragment's exchange, in order.
    """
    rounds = Counter(one.number // config.fragments for one in times)
    whole = sorted(number for number, count in rounds.items() if count == config.fragments)
    kept = whole[-_MOST_ROUNDS:]
    for before, one in zip([None, *times], times, strict=False):
        if kept and kept[0] <= one.number // config.fragments <= kept[-1]:
            yield from _spans_of_fragment(one, before, config, device, worker, kept[0])


def _spans_of_fragment(
    times: ExchangeTimes,
    before: ExchangeTimes | None,
    config: Local,
    device: Device,
    worker: int,
    first_round: int,
) -> Iterator[Span]:
    """Yield the spans of a fragment's exchange, and of the inner steps before it.

    `before`: the times of the previous exchange; None for the first. `first_round`: number of the
    first traced round.
    """
    number, fragment = divmod(times.number, config.fragments)
    number, part = number - first_round, str(fragment)
    has_delay, is_gpu = config.delay > 0, device.kind is DeviceKind.GPU
    turn, is_first = turns(config, config.sync_every)[fragment], not (number or fragment)

    def span(kind: Kind, part: str, start_s: float, end_s: float, lane: Lane | None = None) -> Span:
        on = (Resource(device.name, lane) if lane else compute_lane(device.name),)
        return Span(kind, number, part, worker, on, start_s, max(start_s, end_s))

    start_s = times.trained_from_s
    if before is not None and turn.overlapped:
        if is_first:  # as in the plan, one span for all steps before the run's first exchange
            start_s = before.copied_s
        else:
            yield span(Kind.TRAIN, f"{part}.overlapped", before.copied_s, before.due_s)
    if turn.alone or is_first:
        yield span(Kind.TRAIN, part, start_s, times.sent_s)
    if is_gpu:
        yield span(Kind.D2H, part, times.sent_s, times.copied_s, Lane.D2H)
        yield span(Kind.STEP, part, times.averaged_s, times.stepped_s)
        yield span(Kind.H2D, part, times.loading_s, times.loaded_s, Lane.H2D)
    else:
        # With a delay, the outer step overlaps with inner steps. So the exchange's span includes
        # the outer step, and the STEP span covers only the loading of parameters.
        stepping_s = times.loading_s if has_delay else times.averaged_s
        yield span(Kind.STEP, part, stepping_s, times.loaded_s)
    end_s = times.stepped_s if has_delay and not is_gpu else times.averaged_s
    yield Span(Kind.REDUCE, number, part, None, (exchange_lane(device.name),), times.begun_s, end_s)
