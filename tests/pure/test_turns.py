"""Choices between alternatives by their step times, which the tests set."""

import random
from collections.abc import Callable
from itertools import groupby

import pytest

from paceline.core.turns import Choice, Watch, is_faster


def chosen(choice: Choice, takes: Callable[[str, int], float]) -> list[str]:
    """Return the alternative of each step until the choice; `takes(name, step)` is in seconds."""
    used = list[str]()
    while not choice.settled:
        name = choice.name
        seconds = []
        for _ in range(choice.num_settling + choice.num_timed):
            seconds.append(takes(name, len(used)))
            used.append(name)
        choice.add(seconds[-choice.num_timed :])
    return used


@pytest.mark.parametrize(
    ("names", "seconds", "turns", "expected"),  # seconds of a step: 1 unless set
    [
        *[("pht", {one: 0.9}, "p9 h9 t15 h9 p9", one) for one in "pht"],
        ("pht", {"t": 0.99}, "p9 h9 t15 h9 p9", "p"),  # almost a tie: the simplest alternative
        ("pht", {"h": 2.0, "t": 0.9}, "p9 h9 t15 p9", "t"),  # a hopeless one has one turn
        *[("ph", {slow: 1.6}, "p9 h9", fast) for slow, fast in ("ph", "hp")],  # one is left
        ("ph", {"p": 1.4}, "p9 h15 p9", "h"),  # each has a second turn, unless it is hopeless
        ("ph", {"h": 1.4}, "p9 h15", "p"),
        ("p", {}, "", "p"),
    ],
)
def test_the_fastest_alternative_is_chosen_after_its_turns(names, seconds, turns, expected):
    """Two turns in a row have only three untimed steps."""
    choice = Choice([*names])
    used = chosen(choice, lambda name, _: seconds.get(name, 1.0))
    assert " ".join(f"{name}{len([*steps])}" for name, steps in groupby(used)) == turns
    assert choice.name == expected
    assert turns == "" or choice.seconds == {name: seconds.get(name, 1.0) for name in names}


@pytest.mark.parametrize("unlikely", ["", "h"])
def test_one_slow_turn_confirms_a_prediction(unlikely):
    choice = Choice("ph", unlikely=unlikely)
    used = chosen(choice, lambda name, _: 1.2 if name == "h" else 1.0)
    assert (choice.name, used.count("h")) == ("p", 9 if unlikely else 15)


@pytest.mark.parametrize(
    "takes",
    [
        lambda _, step: 1 + 0.01 * step,  # the machine becomes slower
        lambda _, step: 2 - 0.01 * step,
        # Steps of the first turn may be slow, because the machine warms up.
        lambda name, step: 1.4 if name == "host" else 2.0 if step < 9 else 1.0,
    ],
)
def test_slow_steps_at_the_beginning_or_end_do_not_decide(takes):
    choice = Choice(["plain", "host"])
    chosen(choice, takes)
    assert choice.name == "plain"


def test_noise_selects_the_simpler_and_a_real_difference_the_faster_alternative():
    """With noise of 10 %, few of 200 choices are wrong."""
    noise = random.Random(1)

    def choices(ratio: float) -> list[str]:
        found = []
        for _ in range(200):
            choice = Choice(["plain", "host"])
            chosen(choice, lambda name, _: (ratio if name == "host" else 1) * noise.gauss(1, 0.1))
            found.append(choice.name)
        return found

    assert choices(1.0).count("host") <= 20
    assert choices(0.85).count("plain") <= 4


@pytest.mark.parametrize(
    ("num_fast", "name", "num_turns"),
    [
        ([4, 4, 6, 6], "host", 6),  # slow steps at first hide the difference from the test
        ([4, 3, 4, 3], "plain", 8),
    ],
)
def test_two_alternatives_have_further_turns_while_a_lower_median_is_not_significant(
    num_fast, name, num_turns
):
    choice, used = Choice(["plain", "host"]), list[str]()
    while not choice.settled:
        fast = num_fast[used.count("host")] if choice.name == "host" else 0
        used.append(choice.name)
        choice.add([0.88] * fast + [1.3 if choice.name == "host" else 1.0] * (6 - fast))
    assert (choice.name, len(used)) == (name, num_turns)


@pytest.mark.parametrize(
    ("slow_turns", "name", "num_turns"), [({0}, "host", 3), ({1}, "host", 3), ({0, 2}, "plain", 4)]
)
def test_an_alternative_of_which_a_turn_was_slowed_has_further_turns(slow_turns, name, num_turns):
    """Another program slows turns of the faster alternative."""
    choice, num_used = Choice(["plain", "host"]), 0
    while not choice.settled:
        host_s = 1.2 if num_used in slow_turns else 0.9
        is_host = choice.name == "host"
        num_used += is_host
        choice.add([host_s if is_host else 1.0] * 6)
    assert (choice.name, num_used) == (name, num_turns)


def test_an_alternative_slower_by_15_percent_is_not_chosen_for_its_simplicity():
    """Its turns end before a rank-sum test could be significant."""
    choice = Choice(["plain", "host"])
    while not choice.settled:
        choice.add([1.2] * 6 if choice.name == "plain" else [0.99] * 4 + [1.9] * 2)
    assert choice.name == "host"


def test_a_dropped_alternative_is_not_chosen():
    choice = Choice(["plain", "host", "tree"])
    choice.add([1.0] * 6)
    assert choice.name == "host"
    choice.drop()
    assert choice.name == "tree"
    choice.drop()
    assert choice.settled
    assert choice.name == "plain"


def test_stopping_chooses_among_the_timed_alternatives():
    choice = Choice(["plain", "host", "tree"])
    choice.stop()
    assert choice.name == "plain"
    choice = Choice(["plain", "host", "tree"])
    choice.add([1.0] * 6)
    choice.add([0.9] * 6)
    choice.stop()
    assert choice.name == "host"


@pytest.mark.parametrize("num_turns", [0, 1, 2])
def test_stopping_keeps_the_former_choice_until_all_alternatives_are_timed_again(num_turns):
    choice = Choice(["plain", "host"])
    chosen(choice, lambda name, _: 1.0 if name == "host" else 2.0)
    while choice.settled:
        choice.add([3.0] * Watch.num_steps)
    for seconds in (1.0, 3.0)[:num_turns]:  # now the simpler one is faster
        choice.add([seconds] * choice.num_timed)
    choice.stop()
    assert choice.name == ("plain" if num_turns == 2 else "host")


def test_a_watch_reports_lasting_changes_but_no_noise():
    noise = random.Random(2)

    def steps(mean: float, spread: float) -> list[float]:
        return [mean * (1 + noise.uniform(-spread, spread)) for _ in range(Watch.num_steps)]

    watch = Watch()
    assert not any(watch.has_changed(steps(1.0, 0.5)) for _ in range(200))
    assert watch.has_changed(steps(1.5, 0.5))
    assert watch.has_changed(steps(0.6, 0.5))
    steady = Watch()
    assert not any(steady.has_changed(steps(mean, 0.02)) for mean in (1.0, 1.08, 0.93))
    assert steady.has_changed(steps(1.13, 0.02))
    assert steady.has_changed(steps(0.88, 0.02))


@pytest.mark.parametrize(("seconds", "expected"), [(1.2, False), (1.4, True), (10.0, True)])
def test_a_watch_reports_a_large_change_right_after_the_choice(seconds, expected):
    watch = Watch([1.0] * 12)
    assert watch.has_changed([1.0] * 20 + [seconds] * 30) is expected


def test_a_few_slow_steps_are_no_change():
    watch = Watch()
    watch.has_changed([1.0] * 50)
    assert not watch.has_changed([1.0] * 40 + [9.0] * 10)


def test_the_rank_sum_test_agrees_with_the_published_table():
    """For 8 and 8 values, P(U <= 15) is 0.041 and P(U <= 16) 0.052 (Mann and Whitney 1947)."""
    ranks = list(range(16))

    def with_wins(losses: int) -> bool:
        # the first eight values win all pairs except `losses`
        own, other = list(range(8)), list(range(8, 16))
        for _ in range(losses):
            place = next(i for i in reversed(range(8)) if own[i] + 1 not in own and own[i] < 15)
            other[other.index(own[place] + 1)] = own[place]
            own[place] += 1
        assert sorted(own + other) == ranks
        return is_faster([1.0 + one for one in own], [1.0 + one for one in other], worth=-9.0)

    assert with_wins(15)
    assert not with_wins(17)
