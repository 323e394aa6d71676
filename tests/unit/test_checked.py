"""Changing one's mind: which candidate is used after what its steps took."""

import pytest

from paceline.exchange.trials import Candidate, Checked

TRIAL = 11  # calls until a candidate is judged


class Clock:
    now = 0.0

    def mark(self):
        return self.now

    def seconds(self, marks):
        return list(marks)


class Slow:
    """A replica whose steps take so long."""

    def __init__(self, seconds: float, clock: Clock) -> None:
        self.seconds, self._clock = seconds, clock
        self.recorder, self.closed = None, False

    def __call__(self):
        self._clock.now += self.seconds
        return self.seconds

    def record(self, recorder):
        self.recorder = recorder

    def close(self):
        self.closed = True


class Alone:
    """A group of this process and a slower one."""

    def __init__(self, slower: float = 1.0) -> None:
        self._slower = slower

    def gather(self, value):
        return [value, self._slower * value]


@pytest.fixture
def clock() -> Clock:
    return Clock()


def run(clock, ways, num_calls=100, num_steps=1000, group=None):
    """Train with ways of (name, predicted, real) seconds; return the steps' times and the words."""
    replicas: list[Slow] = []

    def maker(real):
        def make():
            replicas.append(Slow(real, clock))
            return replicas[-1]

        return make

    said: list[str] = []
    candidates = [Candidate(name, predicted, maker(real)) for name, predicted, real in ways]
    found = Checked(candidates, group or Alone(), clock, 0.16, num_steps, said.append)
    seconds = [found() for _ in range(num_calls)]
    assert [one.closed for one in replicas] == [True] * (len(replicas) - 1) + [False]
    return found, seconds, said


def test_a_good_prediction_is_kept_in_silence(clock):
    found, seconds, said = run(clock, [("a", 1.0, 1.15), ("b", 1.1, 0.5)])
    assert (found.name, set(seconds), said) == ("a", {1.15}, [])


def test_a_wrong_prediction_makes_room_for_the_next(clock):
    found, seconds, said = run(clock, [("a", 1.0, 2.0), ("b", 1.2, 1.3)])
    assert found.name == "b"
    assert seconds == [2.0] * (TRIAL - 1) + [1.3] * (100 - TRIAL + 1)
    assert said == [
        "auto: a takes 2.00 s a step, and not 1.00 s as predicted; trying b, predicted to "
        "take 1.20 s",
        "auto: b from now on; measured a 2.00 s, b 1.30 s",
    ]
    assert found.num_searched == 2 * TRIAL - 1


def test_it_goes_back_if_the_next_is_worse(clock):
    found, seconds, said = run(clock, [("a", 1.0, 2.0), ("b", 1.2, 3.0)])
    assert found.name == "a"
    assert seconds[-1] == 2.0
    assert said[-1] == "auto: a from now on; measured a 2.00 s, b 3.00 s"


def test_what_was_predicted_to_be_slower_than_that_is_not_tried(clock):
    found, _, said = run(clock, [("a", 1.0, 2.0), ("b", 2.1, 0.5)])
    assert (found.name, said) == ("a", [])


def test_all_that_may_be_faster_are_tried(clock):
    found, _, said = run(clock, [("a", 1.0, 4.0), ("b", 1.2, 3.0), ("c", 1.4, 2.0)])
    assert (found.name, len(said)) == ("c", 3)


def test_the_slowest_rank_counts(clock):
    found, _, _ = run(clock, [("a", 1.0, 1.1), ("b", 1.2, 1.2)], group=Alone(slower=2.0))
    assert found.name == "a"  # b takes 2.4 s there
    found, _, said = run(clock, [("a", 1.0, 1.1), ("b", 1.05, 0.9)], group=Alone(slower=2.0))
    assert found.name == "b"
    assert "a takes 2.20 s" in said[0]


@pytest.mark.parametrize("num_steps", [5, TRIAL, 2 * TRIAL - 2, 2 * TRIAL])
def test_after_the_last_step_of_the_search_nothing_changes(clock, num_steps):
    _, seconds, _ = run(clock, [("a", 1.0, 2.0), ("b", 1.2, 1.3)], num_steps=num_steps)
    assert len(set(seconds[num_steps:])) == 1


def test_a_recorder_follows(clock):
    found, _, _ = run(clock, [("a", 1.0, 2.0), ("b", 1.2, 1.3)], num_calls=1)
    found.record("recorder")
    for _ in range(100):
        found()
    assert found.name == "b"
    assert found._replica.recorder == "recorder"


def test_a_single_candidate_is_not_measured(clock):
    found, _, said = run(clock, [("a", 1.0, 9.0)])
    assert (found.name, said) == ("a", [])
