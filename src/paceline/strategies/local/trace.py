"""Convert a worker's last rounds to spans named as the plan's tasks."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from paceline.core.cost import compute_lane, exchange_lane
from paceline.core.machine import Device, DeviceKind
from paceline.core.plan import Kind, Lane, Resource
from paceline.core.timeline import Span
from paceline.exchange.running_exchange import ExchangeTimes
from paceline.strategies.local.config import Local
from paceline.strategies.local.plan import turns

_MOST_ROUNDS = 5


def spans_of(
    times: Sequence[ExchangeTimes], config: Local, device: Device, worker: int
) -> Iterator[Span]:
    """Yield the spans of the last whole rounds, numbered from 0."""
    count = config.fragments
    rounds = sorted({one.number // count for one in times})
    whole = [r for r in rounds if sum(one.number // count == r for one in times) == count]
    if not whole:
        return
    first = whole[-_MOST_ROUNDS:][0]
    for before, one in pairwise([None, *times]):
        assert one is not None  # None is only before the first
        if first <= one.number // count <= whole[-1]:
            fragment = _Fragment(one, before, config, device, worker, first)
            yield from fragment.trained()
            yield from fragment.exchanged()


class _Fragment:
    """Makes the spans of a fragment of a round, and of the inner steps before it."""

    def __init__(
        self,
        times: ExchangeTimes,
        before: ExchangeTimes | None,
        config: Local,
        device: Device,
        worker: int,
        first_round: int,
    ) -> None:
        self._times, self._before, self._device, self._worker = times, before, device, worker
        number, self._fragment = divmod(times.number, config.fragments)
        self._round = number - first_round
        self._turn = turns(config, config.sync_every)[self._fragment]
        self._has_delay = config.delay > 0
        self._is_gpu = device.kind is DeviceKind.GPU

    def trained(self) -> Iterator[Span]:
        """Yield the inner steps during and after the exchange of the fragment before."""
        times, before = self._times, self._before
        part, start_s = str(self._fragment), times.trained_from_s
        if before is not None and self._turn.beside:
            if self._round or self._fragment:
                yield self._span(Kind.TRAIN, f"{part}.beside", before.copied_s, before.due_s)
            else:  # nothing travels in the first round of a plan
                start_s = before.copied_s
        if self._turn.alone or not (self._round or self._fragment):
            yield self._span(Kind.TRAIN, part, start_s, times.sent_s)

    def exchanged(self) -> Iterator[Span]:
        """Yield the exchange and the outer step."""
        times, part = self._times, str(self._fragment)
        if self._is_gpu:
            yield self._span(Kind.D2H, part, times.sent_s, times.copied_s, Lane.D2H)
            yield self._span(Kind.STEP, part, times.averaged_s, times.stepped_s)
            yield self._span(Kind.H2D, part, times.loading_s, times.loaded_s, Lane.H2D)
        elif self._has_delay:  # the outer step ran beside inner steps
            yield self._span(Kind.STEP, part, times.loading_s, times.loaded_s)
        else:
            yield self._span(Kind.STEP, part, times.averaged_s, times.loaded_s)
        beside_s = times.stepped_s if self._has_delay and not self._is_gpu else times.averaged_s
        on = (exchange_lane(self._device.name),)
        yield Span(Kind.REDUCE, self._round, part, None, on, times.begun_s, beside_s)

    def _span(
        self, kind: Kind, part: str, start_s: float, end_s: float, lane: Lane = Lane.COMPUTE
    ) -> Span:
        on = (Resource(self._device.name, lane),)
        if lane is Lane.COMPUTE:
            on = (compute_lane(self._device.name),)
        return Span(kind, self._round, part, self._worker, on, start_s, max(start_s, end_s))
