"""Convert the measured times of a worker's last rounds to spans of the plan's tasks."""

from collections import Counter
from collections.abc import Iterator, Sequence

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
    """Yield the spans of the last complete rounds, at most five, numbered from 0."""
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
    """Yield the spans of a fragment: inner steps before it is sent, exchange, and outer step."""
    number, fragment = divmod(times.number, config.fragments)
    number, part = number - first_round, str(fragment)
    has_delay, is_gpu = config.delay > 0, device.kind is DeviceKind.GPU
    turn, is_first = turns(config, config.sync_every)[fragment], not (number or fragment)

    def span(kind: Kind, part: str, start_s: float, end_s: float, lane: Lane | None = None) -> Span:
        on = (Resource(device.name, lane) if lane else compute_lane(device.name),)
        return Span(kind, number, part, worker, on, start_s, max(start_s, end_s))

    start_s = times.trained_from_s
    if before is not None and turn.overlapped:
        if is_first:  # in a plan, no exchange precedes the first fragment of the first round
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
        # With a delay, the outer step overlaps with inner steps. So its time is part of the
        # exchange's span, and the span of the outer step covers only the loading of parameters.
        stepping_s = times.loading_s if has_delay else times.averaged_s
        yield span(Kind.STEP, part, stepping_s, times.loaded_s)
    end_s = times.stepped_s if has_delay and not is_gpu else times.averaged_s
    yield Span(Kind.REDUCE, number, part, None, (exchange_lane(device.name),), times.begun_s, end_s)
