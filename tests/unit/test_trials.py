"""The exchange chosen by measured steps, with a clock that the test sets."""

import pytest
import torch

from paceline.core.errors import InvalidInput
from paceline.exchange.trials import Candidate, Checked, Trials
from paceline.links.rendezvous import joined

METHODS = ["allreduce", "tree", "host"]
TRIAL = 11  # calls until a candidate is judged


class Clock:
    now = 100.0

    def mark(self):
        return self.now

    def seconds(self, marks):
        return list(marks)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def train(trials, clock, takes, steps=100):
    """Take steps as a replica does, which checks the trials before each forward pass."""
    used = []
    for step in range(steps):
        if trials.due:
            trials.finish_measurement(joined(torch.device("cpu")))
        used.append(trials.name)
        clock.now += takes(trials.name, step)
        trials.exchanged()
    return used


@pytest.mark.parametrize("fastest", ["allreduce", "tree", "host"])
def test_the_fastest_is_kept_after_a_few_steps_of_each(clock, fastest):
    trials = Trials(METHODS, clock)
    used = train(trials, clock, lambda name, _: 0.01 if name == fastest else 0.02)
    assert trials.settled
    assert all(used.count(name) >= 7 for name in METHODS)
    assert used[40:] == [fastest] * 60
    assert trials.why().startswith(f"{fastest}: ")
    assert f"{fastest} 10 ms" in trials.why()


def test_the_first_steps_and_one_that_was_held_up_do_not_count(clock):
    """The tree's first steps are slow, and one step writes a checkpoint."""
    trials, own = Trials(METHODS, clock), {"allreduce": 0, "tree": 0, "host": 0}

    def takes(name, _):
        own[name] += 1
        if name == "tree":
            return 5.0 if own[name] <= 5 or own[name] == 9 else 0.01
        return 0.02

    train(trials, clock, takes)
    assert trials.name == "tree"


def test_one_that_cannot_be_used_is_left_out_and_named(clock):
    trials = Trials(METHODS, clock)
    train(trials, clock, lambda name, _: 0.02, steps=13)
    trials.finish_measurement(joined(torch.device("cpu")))
    assert trials.name == "tree"
    trials.fail(InvalidInput("memory", "there is none"))
    assert trials.name == "host"
    for figure in ("host: ", "allreduce 20 ms", "tree", "memory: "):
        assert figure in trials.why()
    assert train(trials, clock, lambda name, _: 0.03, steps=30)[-1] == "allreduce"


def test_a_figure_of_other_chunks_is_not_that_of_those_in_use(clock):
    """ "host" was measured with predicted chunks; its chunk search continues."""
    trials = Trials(METHODS, clock)
    for name, chunk in {"allreduce": None, "tree": None, "host": 8}.items():
        for _ in range(13):
            clock.now += 0.01 if name == "host" else 0.02
            trials.exchanged()
        trials.finish_measurement(joined(torch.device("cpu")), chunk)
    reason = trials.why(8, is_searched=True)
    for figure in ("allreduce 20 ms", "host 10 ms in chunks of 8 layers", "tree 20 ms"):
        assert figure in reason
    for chunk, is_searched, count in ((4, True, " 4 layers"), (1, False, " 1 layer,")):
        other = trials.why(chunk, is_searched=is_searched)
        assert other.startswith(reason)
        assert count in other.removeprefix(reason)


class Slow:
    """A replica whose steps take `seconds`."""

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


def run(clock, ways, num_calls=100, num_steps=1000, group=None):
    """Train with candidates (name, predicted, real seconds); return step times and reasons."""
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


@pytest.mark.parametrize(
    ("ways", "slower", "kept", "num_said", "last_s"),
    [
        ([("a", 1.0, 1.15), ("b", 1.1, 0.5)], 1, "a", 0, 1.15),  # well predicted
        ([("a", 1.0, 2.0), ("b", 1.2, 3.0)], 1, "a", 2, 2.0),  # it goes back to it
        ([("a", 1.0, 2.0), ("b", 2.1, 0.5)], 1, "a", 0, 2.0),  # b was predicted to be slower
        ([("a", 1.0, 9.0)], 1, "a", 0, 9.0),
        ([("a", 1.0, 4.0), ("b", 1.2, 3.0), ("c", 1.4, 2.0)], 1, "c", 3, 2.0),
        ([("a", 1.0, 1.1), ("b", 1.2, 1.2)], 2, "a", 2, 1.1),  # the slowest rank takes 2.4 s with b
        ([("a", 1.0, 1.1), ("b", 1.05, 0.9)], 2, "b", 2, 0.9),
    ],
)
def test_what_is_kept_is_the_fastest_of_those_that_were_worth_a_trial(
    clock, ways, slower, kept, num_said, last_s
):
    found, seconds, said = run(clock, ways, group=Alone(slower))
    assert (found.name, len(said), seconds[-1]) == (kept, num_said, last_s)
    assert len(said) == 0 or said[-1].startswith(f"auto: {kept} ")


def test_a_wrong_prediction_makes_room_for_the_next(clock):
    found, seconds, said = run(clock, [("a", 1.0, 2.0), ("b", 1.2, 1.3)])
    assert found.name == "b"
    assert seconds == [2.0] * (TRIAL - 1) + [1.3] * (100 - TRIAL + 1)
    tried, settled = said
    assert all(figure in tried for figure in ("auto: a ", "2.00 s", "1.00 s", " b", "1.20 s"))
    assert all(figure in settled for figure in ("auto: b ", "a 2.00 s", "b 1.30 s"))
    assert found.num_searched == 2 * TRIAL - 1


@pytest.mark.parametrize("num_steps", [5, TRIAL, 2 * TRIAL - 2, 2 * TRIAL])
def test_after_the_last_step_of_the_search_nothing_changes(clock, num_steps):
    _, seconds, _ = run(clock, [("a", 1.0, 2.0), ("b", 1.2, 1.3)], num_steps=num_steps)
    assert len(set(seconds[num_steps:])) == 1


def test_a_recorder_follows(clock):
    found, _, _ = run(clock, [("a", 1.0, 2.0), ("b", 1.2, 1.3)], num_calls=1)
    found.record("recorder")
    for _ in range(100):
        found()
    assert (found.name, found._replica.recorder) == ("b", "recorder")
