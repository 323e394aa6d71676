"""How restless steps are, and that restless ones are measured longer: by steps of known seconds."""

from collections.abc import Sequence

import pytest
import torch

from boxes import chain
from groups import group_of
from paceline.core.cost import compute_lane, exchange_lane
from paceline.core.machine import DeviceKind
from paceline.core.plan import Kind
from paceline.core.timeline import Span
from paceline.links.group import Group
from paceline.measure.unrest import Rounds, rounds_of_all, unrest_of, unrest_of_traced
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.measure import DeviceProfile, calibrate, profile_device

CALM: Rounds = [[1.0, 9.0]] * 8
RESTLESS: Rounds = [[1.0, 9.0], [2.0, 9.0]] * 4  # quartiles 1 and 2 around 1.5


def test_equal_steps_have_no_unrest() -> None:
    assert unrest_of([[[1.0, 9.0]] * 8, [[2.0, 7.0]] * 8]) == 0.0


def test_the_slowest_ranks_steps_count_and_no_exchange() -> None:
    # The slowest of each round: 4, 5, 6, 7, 8, with quartiles 5 and 7 around 6.
    first = [[own, 100.0] for own in (4.0, 1.0, 6.0, 1.0, 8.0)]
    second = [[own, 0.0] for own in (1.0, 5.0, 1.0, 7.0, 1.0)]
    assert unrest_of([first, second]) == pytest.approx(2 / 12)


def test_a_single_pause_is_no_unrest() -> None:
    assert unrest_of([[[1.0]] * 9 + [[50.0]]]) == 0.0


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        ([CALM, RESTLESS], CALM),
        ([RESTLESS, CALM, CALM], RESTLESS + CALM),
        ([RESTLESS, RESTLESS, CALM], RESTLESS + RESTLESS),
    ],
    ids=["calm", "restless at first", "restless for good"],
)
def test_rounds_are_taken_once_more_if_the_first_are_restless(
    taken: Sequence[Rounds], expected: Rounds
) -> None:
    left = list(taken)
    assert rounds_of_all(lambda: left.pop(0), group_of()) == [expected]
    assert len(left) == 1


class BesideRestless(Group):
    """A rank whose neighbour, on the same host, is disturbed."""

    def gather(self, value: Rounds) -> list[Rounds]:
        return [value, [[10 * step, other] for step, other in RESTLESS]]


def test_a_calm_rank_takes_more_rounds_with_a_restless_one() -> None:
    """Exchanges are collectives: a rank that stopped by itself would leave the others waiting."""
    own, other = rounds_of_all(lambda: CALM, group_of(0, 2, kind=BesideRestless))
    assert (own, len(other)) == (CALM + CALM, 2 * len(RESTLESS))


def span(step: int, device: str, seconds: float, kind: Kind = Kind.FORWARD) -> Span:
    lane = exchange_lane(device) if kind is Kind.REDUCE else compute_lane(device)
    return Span(kind, step, kind.value, 0, (lane,), 5.0, 5.0 + seconds)


def test_the_unrest_of_traced_steps_is_that_of_what_the_slowest_device_computes() -> None:
    # In turns 2 + 3 and 2 + 1: of the first device 5, of the second one 4 where that is more.
    spans = []
    for step in range(8):
        spans += [span(step, "cpu0", 2.0), span(step, "cpu0", 3.0 - 2 * (step % 2), Kind.BACKWARD)]
        spans += [span(step, "cpu1", 4.0), span(step, "cpu1", 100.0 * step, Kind.REDUCE)]
    assert unrest_of_traced(spans) == pytest.approx(1 / (2 * 4.5))
    assert unrest_of_traced(spans[:1]) == 0.0


def test_a_device_of_wheel_tells_how_restless_its_steps_are() -> None:
    spans: list[Span] = []

    def run_step(number: int) -> None:
        spans.append(span(number, "cpu1", 1.0 + number % 2))

    found = profile_device(torch.device("cpu"), Wheel(), run_step, spans, 0.0)
    # After two to warm up three steps of 1, 2 and 1 s, with quartiles 1 and 1.5.
    assert found.unrest == pytest.approx(0.25)


@pytest.mark.parametrize(("cores", "expected"), [(3, 0.4), (2, 0.0)])
def test_bodies_of_wheel_with_a_core_each_widen_the_range(cores: int, expected: float) -> None:
    """Those that share cores disturb each other; any pause is many of a hub's short parts."""

    def device(unrest: float) -> DeviceProfile:
        return DeviceProfile(
            kind=DeviceKind.CPU,
            host="1",
            seconds=((Kind.FORWARD, "l0", 0.5),),
            codecs={},
            cores=cores,
            unrest=unrest,
            link_bytes_per_s=1e8,
        )

    work, config = chain((1.0, 4), (1.0, 4)), Wheel(workers=2, lanes=1)
    bodies = {0: device(0.1), 1: device(0.4)}
    found = calibrate(work, config, device(9.0), bodies, is_paced=False)
    assert found is not None
    assert found.machine.usual_losses.unrest == expected
