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


def test_a_search_for_the_chunk_size_does_not_restart_trials(clock):
    trials = Trials(METHODS, clock)
    train(trials, clock, lambda name, _: 0.01)
    for seconds in (0.02, 0.01, 0.03):
        for _ in range(51):
            clock.now += seconds
            trials.exchanged()
        trials.finish_measurement(list, is_searched=True)
        assert trials.settled


def run(clock, takes, last_step=1000, slowest=list):
    """Train with exchanges of these step times; return trials, step times and decisions."""
    decisions: list[str] = []
    trials = Trials(takes, clock, last_step=last_step, on_decision=decisions.append)
    used = train(trials, clock, lambda name, _: takes[name], slowest=slowest)
    return trials, [takes[name] for name in used], decisions


def test_the_choice_is_by_the_slowest_rank_and_reported_once(clock):
    """Another rank takes 2 s with b."""

    def slowest(own):
        return [2.0 if one == 0.5 else one for one in own]

    takes = {"a": 1.0, "b": 0.5, "c": 0.75}
    trials, seconds, decisions = run(clock, takes, slowest=slowest)
    assert (trials.name, seconds[-1], len(decisions)) == ("c", 0.75, 1)
    assert decisions[0].startswith("auto: c ")
    assert all(f"{name} " in decisions[0] for name in takes)
    assert 0 < trials.num_searched < DECIDED


def test_a_single_candidate_is_not_timed(clock):
    trials, _, decisions = run(clock, {"a": 1.0})
    assert (trials.name, trials.num_searched, decisions) == ("a", 0, [])


@pytest.mark.parametrize("last_step", [5, 21])
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


@pytest.mark.parametrize(("after", "expected"), [([50, 14], "b"), ([37, 27], "a")])
def test_trials_begin_again_if_shares_change_by_more_than_a_tenth_of_the_batch(
    clock, after, expected
):
    shares = [32, 32]
    trials = Trials("ab", clock, shares=lambda: shares)

    def takes(name, step):
        if step == 20:
            shares[:] = after
        return 1.0 if name == "a" else 1.2 if step < 24 else 0.8

    train(trials, clock, takes)
    assert trials.name == expected


def test_trials_end_even_if_shares_keep_changing(clock):
    shares = [48, 16]
    trials = Trials("ab", clock, shares=lambda: shares)

    def takes(name, _):
        shares.reverse()
        return 1.0 if name == "a" else 0.5

    train(trials, clock, takes)
    assert trials.settled
    assert trials.name == "b"
