"""Trials of exchanges during training, on a clock that the test advances."""

import pytest
import torch

from paceline.core.errors import InvalidInput
from paceline.core.turns import Watch
from paceline.exchange.trials import Checked, Trials
from paceline.links.rendezvous import joined
from ticking import Ticking

METHODS = ["allreduce", "host", "tree"]
DECIDED = 60  # all exchanges are tried within these steps


@pytest.fixture
def clock() -> Ticking:
    return Ticking()


def train(trials, clock, takes, steps=100):
    """Train as a replica does: end a due measurement before each forward pass."""
    used = []
    for step in range(steps):
        if trials.due:
            trials.finish_measurement(joined(torch.device("cpu")))
        used.append(trials.name)
        clock.now += takes(trials.name, step)
        trials.exchanged()
    return used


def test_the_first_steps_and_one_slow_step_do_not_count(clock):
    """Tree is slow in its first steps, and in one step that writes a checkpoint."""
    trials, own = Trials(METHODS, clock), dict.fromkeys(METHODS, 0)

    def takes(name, _):
        own[name] += 1
        if name == "tree":
            return 5.0 if own[name] <= 4 or own[name] == 7 else 0.01
        return 0.012

    train(trials, clock, takes)
    assert trials.name == "tree"


def test_an_exchange_that_cannot_be_used_is_left_out_and_named(clock):
    trials = Trials(METHODS, clock)
    train(trials, clock, lambda name, _: 0.02, steps=10)
    trials.finish_measurement(joined(torch.device("cpu")))
    assert trials.name == "host"
    trials.fail(InvalidInput("memory", "there is none"))
    assert trials.name == "tree"
    for figure in ("tree: ", "allreduce 20 ms", "host", "memory: "):
        assert figure in trials.why()
    assert train(trials, clock, lambda name, _: 0.03, steps=60)[-1] == "allreduce"


def test_all_exchanges_are_tried_again_if_step_times_change(clock):
    """The link becomes slow in step 150: within 200 steps the choice is right again."""
    trials = Trials(METHODS, clock)

    def takes(name, step):
        return {"allreduce": 0.01 if step < 150 else 0.1, "host": 0.02, "tree": 0.03}[name]

    used = train(trials, clock, takes, steps=350)
    assert set(used[DECIDED:150]) == {"allreduce"}
    assert set(used[-1:]) == {"host"}


def test_a_search_for_the_chunk_size_does_not_restart_trials(clock):
    trials = Trials(METHODS, clock)
    train(trials, clock, lambda name, _: 0.01)
    for seconds in (0.02, 0.01, 0.03):
        for _ in range(51):
            clock.now += seconds
            trials.exchanged()
        trials.finish_measurement(joined(torch.device("cpu")), 4, is_searched=True)
        assert trials.settled


def test_a_reason_has_the_chunk_size_timed_and_the_one_in_use(clock):
    """Host was timed with the predicted chunk size, and its search continues."""
    trials = Trials(METHODS, clock)
    while not trials.settled:
        name = trials.name
        while not trials.due:
            clock.now += 0.01 if name == "host" else 0.02
            trials.exchanged()
        trials.finish_measurement(joined(torch.device("cpu")), 8 if name == "host" else None)
    reason = trials.why(8, is_searched=True)
    assert reason.startswith("host: ")
    for figure in ("allreduce 20 ms", "host 10 ms in chunks of 8 layers", "tree 20 ms"):
        assert figure in reason
    for chunk, is_searched, count in ((4, True, " 4 layers"), (1, False, " 1 layer")):
        other = trials.why(chunk, is_searched=is_searched)
        assert other.startswith(reason)
        assert count in other.removeprefix(reason)


class Slow:
    """A replica whose steps take a given time."""

    def __init__(self, seconds: float, clock: Ticking) -> None:
        self.seconds, self._clock = seconds, clock
        self.recorder, self.closed = None, False

    def __call__(self):
        self._clock.now += self.seconds
        return self.seconds

    def record(self, recorder):
        self.recorder = recorder

    def close(self):
        self.closed = True


class WithSlower:
    """A group of this process and a slower one."""

    def __init__(self, slower: float) -> None:
        self._slower = slower

    def gather(self, values):
        return [values, [self._slower * one for one in values]]


def run(clock, takes, num_calls=100, num_steps=1000, slower=1.0):
    """Train with candidates of these step times; return replica, step times and decisions."""
    replicas: list[Slow] = []

    def maker(seconds):
        def make(*, init_sync):
            assert init_sync == (not replicas)
            replicas.append(Slow(seconds, clock))
            return replicas[-1]

        return make

    decisions: list[str] = []
    candidates = {name: maker(seconds) for name, seconds in takes.items()}
    found = Checked(candidates, WithSlower(slower), clock, num_steps, decisions.append)
    seconds = [found() for _ in range(num_calls)]
    assert [one.closed for one in replicas] == [True] * (len(replicas) - 1) + [False]
    return found, seconds, decisions


@pytest.mark.parametrize(
    ("takes", "kept"),
    [
        ({"a": 1.0, "b": 0.5}, "b"),
        ({"a": 1.0, "b": 2.0}, "a"),
        ({"a": 1.0, "b": 0.9, "c": 0.8}, "c"),
    ],
)
def test_the_fastest_candidate_is_kept_and_the_choice_reported_once(clock, takes, kept):
    found, seconds, decisions = run(clock, takes, slower=2.0)
    assert (found.name, seconds[-1], len(decisions)) == (kept, takes[kept], 1)
    assert decisions[0].startswith(f"auto: {kept} ")
    assert all(f"{name} " in decisions[0] for name in takes)
    assert 0 < found.num_searched < DECIDED


def test_a_single_candidate_is_not_timed(clock):
    found, _, decisions = run(clock, {"a": 1.0})
    assert (found.name, found.num_searched, decisions) == ("a", 0, [])


@pytest.mark.parametrize("num_steps", [5, 11, 21, 40])
def test_after_the_last_step_of_the_search_nothing_changes(clock, num_steps):
    _, seconds, decisions = run(clock, {"a": 1.0, "b": 0.9}, num_steps=num_steps)
    assert len(set(seconds[num_steps:])) == 1
    assert len(decisions) == 1


def test_a_candidate_known_to_be_slow_is_tried_when_steps_change(clock):
    takes = {"a": [1.0], "b": [0.5]}
    made: list[str] = []

    def maker(name):
        def make(*, init_sync):
            assert init_sync == (not made)  # later replicas have equal parameters
            made.append(name)
            return Slow(takes[name][0], clock)

        return make

    candidates = {name: maker(name) for name in takes}
    found = Checked(candidates, WithSlower(1.0), clock, 1000, lambda _: None, slow=["b"])
    for _ in range(3 * Watch.num_steps):
        found()
    assert (found.name, set(made)) == ("a", {"a"})
    found._replica.seconds = takes["a"][0] = 2.0
    for _ in range(3 * Watch.num_steps):
        found()
    assert found.name == "b"


def test_a_recorder_is_attached_to_later_candidates(clock):
    found, _, _ = run(clock, {"a": 1.0, "b": 0.5}, num_calls=1)
    found.record("recorder")
    for _ in range(100):
        found()
    assert (found.name, found._replica.recorder) == ("b", "recorder")
