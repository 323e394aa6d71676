"""The default outer step, by the numbers of rounds, workers and inner steps."""

import pytest

from paceline.core.rounds import AVERAGE, OuterStep, Rounds


@pytest.mark.parametrize(
    ("rounds", "workers", "num_rounds", "expected"),
    [
        (Rounds(sync_every=2), 2, 750, AVERAGE),
        (Rounds(sync_every=30), 1, 50, AVERAGE),
        (Rounds(sync_every=30), 2, 50, OuterStep(0.9, 0.4)),
        (Rounds(sync_every=30), 2, None, OuterStep(0.9, 0.4)),
        (Rounds(sync_every=500), 8, 5000, OuterStep(0.8, 0.9)),
        (Rounds(sync_every=500), 8, 10**6, OuterStep(0.8, 0.9)),
        (Rounds(sync_every=1, outer="nesterov"), 2, 50, OuterStep(0.9, 0.4)),
        (Rounds(sync_every=500, outer="average"), 2, 5000, AVERAGE),
        (Rounds(outer="average", outer_momentum=0.3), 2, 50, OuterStep(1.0, 0.3)),
        (Rounds(outer_learning_rate=0.1), 2, 50, OuterStep(0.1, 0.4)),
    ],
)
def test_the_outer_step_follows_the_run(
    rounds: Rounds, workers: int, num_rounds: float | None, expected: OuterStep
) -> None:
    found = rounds.outer_step(workers, rounds.sync_every, num_rounds)
    assert found == pytest.approx(expected)


def test_momentum_rises_with_the_rounds() -> None:
    counts = [10, 100, 300, 1000, 3000, 5000, 10000]
    momenta = [Rounds().outer_step(2, 100, count).momentum for count in counts]
    assert momenta == sorted(momenta)
    assert (momenta[0], momenta[-1]) == pytest.approx((0.4, 0.9))
