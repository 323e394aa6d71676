"""Trials of exchanges during training, on a clock that the test advances."""

import pytest

from paceline.core.errors import InvalidInput
from paceline.core.turns import Watch
from paceline.exchange.trials import Trials
from ticking import Ticking

METHODS = ["allreduce", "host", "tree"]
DECIDED = 60  # all exchanges are tried within these steps


@pytest.fixture
def clock() -> Ticking:
    return Ticking()


def train(trials, clock, takes, steps=100, slowest=list):
    """Train as a replica does: end a due measurement before each forward pass."""
    used = []
    for step in range(steps):
        if trials.due:
            trials.finish_measurement(slowest)
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
    told = []
    trials = Trials(METHODS, clock, on_decision=told.append)
    train(trials, clock, lambda name, _: 0.02, steps=10)
    trials.finish_measurement(list)
    assert trials.name == "host"
    trials.fail(InvalidInput("memory", "there is none"))
    assert trials.name == "tree"
    assert "host" in told[0]
    assert "there is none" in told[0]
    for figure in ("tree: ", "allreduce 20 ms", "host", "memory: "):
        assert figure in trials.why
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
        trials.finish_measurement(list, is_searched=True)
        assert trials.settled


def run(clock, takes, num_steps=100, last_step=1000, slower=1.0):
    """Train with exchanges of these step times; return trials, step times and decisions."""
    decisions: list[str] = []
    trials = Trials(takes, clock, last_step=last_step, on_decision=decisions.append)

    def slowest(own):
        return [slower * one for one in own]

    used = train(trials, clock, lambda name, _: takes[name], num_steps, slowest)
    return trials, [takes[name] for name in used], decisions


@pytest.mark.parametrize(
    ("takes", "kept"),
    [
        ({"a": 1.0, "b": 0.5}, "b"),
        ({"a": 1.0, "b": 2.0}, "a"),
        ({"a": 1.0, "b": 0.9, "c": 0.8}, "c"),
    ],
)
def test_the_fastest_candidate_is_kept_and_the_choice_reported_once(clock, takes, kept):
    trials, seconds, decisions = run(clock, takes, slower=2.0)
    assert (trials.name, seconds[-1], len(decisions)) == (kept, takes[kept], 1)
    assert decisions[0].startswith(f"auto: {kept} ")
    assert all(f"{name} " in decisions[0] for name in takes)
    assert 0 < trials.num_searched < DECIDED


def test_a_single_candidate_is_not_timed(clock):
    trials, _, decisions = run(clock, {"a": 1.0})
    assert (trials.name, trials.num_searched, decisions) == ("a", 0, [])


@pytest.mark.parametrize("last_step", [5, 11, 21, 40])
def test_after_the_last_step_of_the_search_nothing_changes(clock, last_step):
    _, seconds, decisions = run(clock, {"a": 1.0, "b": 0.9}, last_step=last_step)
    assert len(set(seconds[last_step:])) == 1
    assert len(decisions) == 1


def test_a_candidate_known_to_be_slow_is_tried_when_steps_change(clock):
    takes, decisions = {"a": 1.0, "b": 0.5}, []
    trials = Trials(takes, clock, slow=["b"], on_decision=decisions.append)
    assert set(train(trials, clock, lambda name, _: takes[name], 3 * Watch.num_steps)) == {"a"}
    takes["a"] = 2.0
    train(trials, clock, lambda name, _: takes[name], 3 * Watch.num_steps)
    assert (trials.name, len(decisions)) == ("b", 2)
