"""Findings of a scaling study whose cells follow a known law."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from findings import by_topic, codes, numbers
from paceline.core.outcome import Insight
from paceline.records.scale import ScaleCell
from paceline.studies.scale.conclusions import comparable, insights, memory_of
from scale_cells import cell, failed, study


def said(cells, topic: str) -> Insight | None:
    return by_topic(insights("net", cells)).get(topic)


def guess(method: str, workers: int, epoch_s: float, within: float = 0.13, **facts) -> ScaleCell:
    """Return a predicted cell whose range is that share of the epoch to both sides."""
    spread = ((1 - within) * epoch_s, (1 + within) * epoch_s)
    return cell(method, workers, kind="predicted", epoch_s=epoch_s, spread=spread, **facts)


def timed(method: str, workers: int, epoch_s: float, *spread: float, **facts) -> ScaleCell:
    return cell(method, workers, epoch_s=epoch_s, spread=spread or (epoch_s, epoch_s), **facts)


def guessed(*epochs_s: float, within: float = 0.13) -> list[ScaleCell]:
    """Return strategies tree and host, predicted on two workers."""
    return [guess(name, 2, s, within) for name, s in zip(("tree", "host"), epochs_s, strict=True)]


def raced(tree: tuple, host: tuple) -> list[ScaleCell]:
    """Return both, measured on two workers: the seconds of their epochs, and the quartiles."""
    return [timed("tree", 2, *tree), timed("host", 2, *host)]


THREE = study({"tree": 40, "host": 4, "allreduce": 9}, (1, 2, 4))
WIDE = guess("allreduce", 2, 14, 0.5)
ALONE = timed("tree", 1, 10.0), timed("allreduce", 1, 12.18)
CLOSE = (
    timed("tree", 1, 10.0, 9.8, 10.2),
    timed("host", 1, 10.1, 9.9, 10.4),
    timed("allreduce", 1, 12.18),
)


@pytest.mark.parametrize(
    ("cells", "finding", "told"),
    [
        # 100 / 4 + 9 over 100 / 4 + 4, and the exposed seconds of both.
        (THREE, "fastest: host allreduce", [4, 16, 1.17, 4.0, 9.0]),
        # Measured on two workers: the quartiles overlap, or they do not.
        (raced((10.0, 9.5, 10.9), (10.6, 10.1, 11.0)), "may_be_fastest: tree host", [2, 16, 1.06]),
        (
            raced((10.0, 9.5, 10.9), (10.6, 10.95, 11)),
            "fastest: tree host",
            [2, 16, 1.06, 9.3, 9.86],
        ),
        # Predicted: 0.87 * 13.1 s = 11.4 s, and 1.13 * 10 s = 11.3 s.
        (guessed(10, 10.1), "equal: tree host", [2, 16]),
        (guessed(10, 12.9), "may_be_fastest: tree host", [2, 16, 1.29]),
        (guessed(10, 13.1), "fastest: tree host", [2, 16, 1.31, 9.3, 12.2]),
        # The range of every method counts, and not of the second alone: here from 7 s.
        (guessed(10, 12, within=0.05), "fastest: tree host", [2, 16, 1.2, 9.3, 11.2]),
        ([*guessed(10, 12, within=0.05), WIDE], "may_be_fastest: tree allreduce", [2, 16, 1.4]),
        # The overhead on one worker is table II of Mojumder et al.
        (ALONE, "alone.least: tree allreduce", [21.8]),
        ([timed("tree", 1, 10.0, 9.0, 12.5), ALONE[1]], "alone.equal", []),
        (CLOSE, "alone.least: tree host allreduce", [21.8]),
    ],
)
def test_a_method_is_the_fastest_only_beyond_the_ranges_of_the_others(cells, finding, told):
    found = said(cells, "method")
    code, _, named = finding.partition(": ")
    assert (found.code, numbers(found.sentence)) == (f"method.{code}", told)
    words = found.sentence.replace(",", " ").replace(":", " ").replace(".", " ").split()
    methods = [word for word in words if word in ("tree", "host", "allreduce")]
    assert list(dict.fromkeys(methods)) == named.split()


def growing(epochs_s: dict[int, float], of=guess) -> list[ScaleCell]:
    return [of("tree", workers, epoch_s) for workers, epoch_s in epochs_s.items()]


def pair(one: tuple, two: tuple, **facts) -> list[ScaleCell]:
    """Return one worker and two: the seconds of their epochs, and the quartiles."""
    return [timed("tree", 1, *one, **facts), timed("tree", 2, *two, **facts)]


SLOW = study({"tree": 20}, (1, 2))


@pytest.mark.parametrize(
    ("cells", "code", "told"),
    [
        # 100, 50 + 20, 25 + 20, 12.5 + 20 and 6.25 + 20 s.
        (study({"tree": 20}, (1, 2, 4, 8, 16)), "pay", [16, 3.81, 1, 24]),
        ([*SLOW, timed("tree", 4, 84.0)], "pay.lose", [2, 1.43, 1, 71, 4, 17]),
        ([SLOW[0], timed("tree", 2, 130.0)], "enough.lose", [1, 2, 23]),
        # One worker was measured beside other work, and two without.
        (growing({1: 63, 2: 5}, timed), "doubtful", [2, 12.6, 1, 2.0]),
        (growing({1: 63, 2: 31}, timed), "pay", [2, 2.03, 1, 100]),
        # Within the quartiles of the repetitions, and beyond them.
        (pair((10.0, 7.9, 13.0), (8.0, 7.0, 9.0)), "may_pay", [2, 1.25, 1]),
        (pair((10.0, 7.9, 13.0), (7.0, 6.0, 7.8)), "pay", [2, 1.43, 1, 71]),
        (pair((10.0, 9.0, 10.4), (11.0, 10.2, 12.0)), "enough.may_lose", [1, 2, 9]),
        (pair((10.0, 9.0, 10.4), (11.0, 10.5, 12.0)), "enough.lose", [1, 2, 9]),
        # Of weak scaling two workers take twice the epoch for twice the samples.
        (pair((10.0, 9.0, 10.4), (22.0, 20.4, 24.0), scaling="weak"), "enough.may_lose", [1, 2, 9]),
        (study({"tree": 25}, (1, 4), scaling="weak"), "pay", [4, 3.2, 1, 80]),  # 4 * 100 / 125
        # Predicted.
        (growing({1: 10, 2: 8}), "may_pay", [2, 1.25, 1]),
        (growing({1: 10, 2: 7.6}), "pay", [2, 1.32, 1, 66]),
        # 16 take 22.8 to 29.7 s, and 8 28.3 to 36.7 s.
        (growing({1: 120, 8: 32.5, 16: 26.25}), "fewer_may_do", [16, 4.57, 1, 8]),
        # The fewest that may do as well, where two numbers may.
        (growing({1: 120, 2: 60, 3: 55, 4: 50}), "fewer_may_do", [4, 2.4, 1, 2]),
        (growing({1: 10, 2: 11}), "may_be_enough.may_lose", [1, 2, 9]),
        (growing({1: 10, 2: 9.99}), "may_be_enough.may_be_same", [1, 2]),
        (growing({1: 10, 2: 13.5}), "enough.lose", [1, 2, 26]),
        (growing({1: 10, 2: 9.8, 3: 20}), "may_be_enough.lose", [1, 3, 50]),
        (growing({2: 10, 4: 5, 8: 4.9}), "pay.may_gain", [4, 2.0, 2, 100, 8, 2]),
    ],
)
def test_workers_pay_only_beyond_the_ranges(cells, code, told):
    found = said(cells, "workers")
    assert (found.code, numbers(found.sentence)) == (f"workers.{code}", [16, *told])


EPOCHS, SHARES = st.floats(1, 100), st.floats(0, 0.7)


@given(EPOCHS, EPOCHS, SHARES, SHARES)
def test_what_is_said_for_sure_holds_throughout_the_ranges(one_s, other_s, one_share, other_share):
    """The worst case is the oracle: the faster at the end of its range, the other at its start."""
    faster, slower = sorted([(one_s, one_share), (other_s, other_share)])
    if faster[0] * (1 + faster[1]) < slower[0] * (1 - slower[1]):
        return
    cells = [guess("tree", 2, *faster), guess("host", 2, *slower)]
    assert said(cells, "method").code in ("method.may_be_fastest", "method.equal")
    cells = [guess("tree", 1, one_s, one_share), guess("tree", 2, other_s, other_share)]
    code = said(cells, "workers").code
    assert code == "workers.may_pay" or "enough.may_" in code


@pytest.mark.parametrize(
    ("parts", "code", "share"),
    [
        ({"exposed_s": 6.0, "idle_s": 1.0}, "link", 60),
        ({"exposed_s": 1.0, "idle_s": 7.0}, "synchronisation", 70),
        ({"exposed_s": 0.5, "idle_s": 0.5}, "computation", 90),
    ],
)
def test_what_limits_and_what_to_change(parts, code: str, share: float):
    found = by_topic(insights("net", [cell("tree", 2, **parts)]))
    assert (found["limit"].code, numbers(found["limit"].sentence)) == (
        *(f"limit.{code}", [2, 16, share]),
    )
    assert found["change"].code == f"change.{code}"
    left_s = 10 - (4.5 if code == "computation" else share / 10)
    assert numbers(found["change"].sentence)[-2:] == pytest.approx([left_s, 10], rel=0.01)


def batches(capacity: float, epoch_s: float, of=cell, **facts) -> list[ScaleCell]:
    """Return two batches of which the larger takes so long; a sample takes 0.125 GB of memory."""
    facts |= {"capacity_bytes": capacity}
    return [
        of("tree", 1, epoch_s=20.0, batch=16, memory_bytes=3 * 10**9, **facts),
        of("tree", 1, epoch_s=epoch_s, batch=32, memory_bytes=5 * 10**9, **facts),
    ]


def test_memory_limits_where_a_larger_batch_pays_and_does_not_fit():
    found = by_topic(insights("net", batches(8.9e9, 12.0)))  # 64 samples need 1 + 8 GB
    assert {one.code for one in found.values()} == {"limit.memory", "change.memory", "memory.grows"}
    assert numbers(found["memory"].sentence)[1] == 63
    assert numbers(found["change"].sentence) == [16, 32, 1.67]
    assert said(batches(9.1e9, 12.0), "limit").code == "limit.computation"
    # Of predictions only where a larger batch is sure to pay.
    for epoch_s, code in ((16.0, "computation"), (12.0, "memory")):
        assert said(batches(8.9e9, epoch_s, guess), "limit").code == f"limit.{code}"
    # A process that was fullest before its steps does not hide that they grow: 10 GB at the start,
    # and a step has half a GB a sample.
    law = ((16, 10), (32, 10), (64, 26))
    known = comparable([cell(batch=size, memory_bytes=full * 10**9) for size, full in law])
    assert memory_of(known, known[0]).sample_bytes == 0.5e9


def test_cells_that_are_more_real_speak_first_and_failed_ones_not_at_all():
    guesses = [guess("tree", 2, 1.0), guess("host", 2, 2.0)]
    found = said([*guesses, timed("tree", 2, 9.0), timed("host", 2, 6.0)], "method")
    assert found.figures[0][0] == "epoch with host"
    assert insights("net", [failed(), failed("tree")]) == insights("net", []) == ()
    assert codes(insights("net", [failed(), cell()])) == ["limit.computation", "change.computation"]


@given(st.floats(0, 1e10), st.floats(1, 1e8), st.integers(1, 64), st.integers(1, 64))
def test_the_line_of_memory_is_the_law_that_made_the_cells(fixed, per_sample, few, more):
    cells = [
        cell(batch=size, memory_bytes=round(fixed + per_sample * size))
        for size in (few, few + more)
    ]
    known = comparable(cells)
    line = memory_of(known, known[0])
    if line is None:  # growth of less than a byte
        assert round(per_sample * more) <= 1
        return
    assert line.sample_bytes == pytest.approx(per_sample, abs=1.0)
    largest = line.largest(16e9)
    assert line.fixed_bytes + largest * line.sample_bytes <= 16e9 + 1
    assert line.fixed_bytes + (largest + 1) * line.sample_bytes > 16e9 - 1
