"""What a study says of cells whose law is known."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.outcome import Insight
from paceline.studies.scale.conclusions import (
    PAYS,
    by_workers,
    comparable,
    gains,
    insights,
    limit,
    memory_of,
    worth,
)
from scale_cells import cell, failed, study

COSTS = st.floats(min_value=0.01, max_value=500)
METHODS = st.dictionaries(
    st.sampled_from(["allreduce", "tree", "host"]), COSTS, min_size=1, max_size=3
)
WORKERS = st.sets(st.integers(1, 16), min_size=1, max_size=5).map(sorted).map(tuple)


def said(cells, topic: str) -> Insight | None:
    return next((one for one in insights("net", cells) if one.topic == topic), None)


def test_the_cheapest_method_is_named_and_why():
    found = said(study({"tree": 40, "host": 4, "allreduce": 9}, (1, 2, 4)), "method")
    assert "host is the fastest" in found.sentence
    assert "on 4 workers" in found.sentence
    # 100 / 4 + 9 over 100 / 4 + 4.
    assert "1.17 times as fast as allreduce" in found.sentence
    assert "exposed communication takes 4.00 s of an epoch, and there 9.00 s" in found.sentence
    assert ("epoch with host", "29.0 s") in found.figures


def test_methods_whose_quartiles_overlap_are_not_told_apart():
    cells = [
        cell("tree", 2, epoch_s=10.0, spread=(9.5, 10.9)),
        cell("host", 2, epoch_s=10.6, spread=(10.1, 11.0)),
    ]
    assert "tree and host are equally fast" in said(cells, "method").sentence
    apart = [cells[0], cells[1].model_copy(update={"spread": (10.95, 11.0)})]
    assert "tree is the fastest" in said(apart, "method").sentence


def test_the_overhead_on_one_worker_is_table_ii():
    cells = [cell("tree", epoch_s=10.0), cell("allreduce", epoch_s=12.18)]
    sentence = said(cells, "method").sentence
    assert sentence == "For net on one worker tree costs least, and allreduce 21.8 % more."
    unsure = [cells[0].model_copy(update={"spread": (9.0, 12.5)}), cells[1]]
    assert "all methods take the same" in said(unsure, "method").sentence


def test_workers_that_pay_and_what_more_would_lose():
    # 100, 50 + 20, 25 + 20, 12.5 + 20 and 6.25 + 20 s; then the exchange doubles.
    cells = study({"tree": 20}, (1, 2, 4, 8, 16))
    found = said(cells, "workers")
    assert found.sentence.startswith("With a batch of 16, 16 workers still pay: 3.81 times")
    slow = [*cells[:2], cell("tree", 4, epoch_s=84.0)]
    sentence = said(slow, "workers").sentence
    assert "2 workers still pay: 1.43 times as fast as 1 worker, 71 %" in sentence
    assert sentence.endswith("4 would lose 17 %.")
    alone = [cells[0], cell("tree", 2, epoch_s=130.0)]
    assert said(alone, "workers").sentence == (
        "With a batch of 16, 1 worker is enough; 2 would lose 23 %."
    )


def test_a_gain_that_sharing_cannot_make_is_doubted():
    """One worker was measured beside other work, and two without: 12.6 times as fast."""
    cells = [cell("tree", 1, epoch_s=63.0), cell("tree", 2, epoch_s=5.0)]
    assert said(cells, "workers").sentence == (
        "With a batch of 16, 2 workers seem to be 12.6 times as fast as 1 worker, more than the "
        "2.00 times that sharing the work can gain: measure again on a machine that nothing else "
        "uses."
    )
    close = [cells[0], cell("tree", 2, epoch_s=31.0)]
    assert "100 % of what as many would" in said(close, "workers").sentence  # 63 / 62


def test_a_gain_within_the_quartiles_does_not_pay():
    base = cell("tree", 1, epoch_s=10.0, spread=(7.9, 13.0))
    unsure = said([base, cell("tree", 2, epoch_s=8.0, spread=(7.0, 9.0))], "workers").sentence
    assert unsure == (
        "With a batch of 16, 2 workers seem to be 1.25 times as fast as 1 worker, which is within "
        "what the figures can tell."
    )
    sure = said([base, cell("tree", 2, epoch_s=7.0, spread=(6.0, 7.8))], "workers").sentence
    assert "2 workers still pay: 1.43 times as fast as 1 worker, 71 %" in sure


@given(METHODS, WORKERS, st.floats(1, 1000), st.floats(0.1, 10))
def test_no_more_than_all_is_reached(methods, workers, compute_s, held_up):
    """However long the machine was busy while one worker was measured."""
    cells = [
        one.model_copy(update={"epoch_s": held_up * one.epoch_s}) if one.workers == 1 else one
        for one in study(methods, workers, (16,), compute_s)
    ]
    found = said(cells, "workers")
    shares = re.findall(r"(\d+) % of what as many", found.sentence) if found else []
    assert all(int(reached) <= 100 for reached in shares)


@pytest.mark.parametrize("scaling", ["strong", "weak"])
def test_a_loss_within_the_quartiles_is_said_to_be_one(scaling: str):
    epochs = 2 if scaling == "weak" else 1  # of one worker's samples, by two
    base = cell("tree", epoch_s=10.0, spread=(9.0, 10.4), scaling=scaling)
    for least_s, unsure in ((10.2, True), (10.5, False)):
        spread = (least_s * epochs, 12.0 * epochs)
        more = cell("tree", 2, epoch_s=11.0 * epochs, spread=spread, scaling=scaling)
        sentence = said([base, more], "workers").sentence
        assert "2 would lose 9 %" in sentence
        assert sentence.endswith("which is within what the figures can tell.") == unsure


def test_weak_scaling_counts_the_samples_that_grow():
    found = said(study({"tree": 25}, (1, 4), scaling="weak"), "workers")
    # Four times the samples in 125 s for 100 s.
    assert "3.20 times as fast" in found.sentence
    assert "16 each" in found.sentence


@pytest.mark.parametrize(
    ("parts", "name", "gain"),
    [
        ({"exposed_s": 6.0, "idle_s": 1.0}, "The link", "without the communication"),
        ({"exposed_s": 1.0, "idle_s": 7.0}, "Synchronisation", "without the waiting"),
        ({"exposed_s": 0.5, "idle_s": 0.5}, "Computation", "on devices twice as fast"),
    ],
)
def test_what_limits_and_what_to_change(parts, name: str, gain: str):
    cells = [cell("tree", 2, **parts)]
    assert said(cells, "limit").sentence.startswith(f"{name} limits tree on 2 workers")
    assert gain in said(cells, "change").sentence


def test_memory_limits_where_a_larger_batch_pays_and_does_not_fit():
    def cells(capacity: float):
        return [
            cell(batch=16, epoch_s=20.0, memory_bytes=3 * 10**9, capacity_bytes=capacity),
            cell(batch=32, epoch_s=12.0, memory_bytes=5 * 10**9, capacity_bytes=capacity),
        ]

    # 1 GB and 0.125 GB a sample: 64 need 9 GB.
    assert "Memory limits" in said(cells(8.9e9), "limit").sentence
    assert "Computation limits" in said(cells(9.1e9), "limit").sentence
    assert "at most 63 fit" in said(cells(8.9e9), "memory").sentence
    assert "1.67 times as fast" in said(cells(8.9e9), "change").sentence


def test_cells_that_are_more_real_speak_first():
    cells = [
        cell("tree", 2, kind="predicted", epoch_s=1.0),
        cell("host", 2, kind="predicted", epoch_s=2.0),
        cell("tree", 2, epoch_s=9.0),
        cell("host", 2, epoch_s=6.0),
    ]
    assert "host is the fastest" in said(cells, "method").sentence


def test_a_study_in_which_all_failed_says_nothing():
    assert insights("net", [failed(), failed("tree")]) == ()
    assert insights("net", []) == ()
    assert {one.topic for one in insights("net", [failed(), cell()])} == {"limit", "change"}


@given(METHODS, WORKERS, st.floats(1, 1000))
def test_what_is_said_is_the_best_of_the_cells(methods, workers, compute_s):
    cells = study(methods, workers, (16, 32), compute_s)
    found = said(cells, "method")
    if found is not None and "is the fastest" in found.sentence:
        assert f"{min(methods, key=methods.__getitem__)} is the fastest" in found.sentence
    known = comparable(cells)
    counts = by_workers(known, 32)
    pays = worth(counts)
    assert all(one.rate <= PAYS * counts[pays].rate for one in counts.values())
    most = max(one.rate for one in counts.values())
    assert all(counts[fewer].rate * PAYS < most for fewer in workers if fewer < pays)


# Powers of two scale without rounding: what is equal stays equal.
@given(METHODS, WORKERS, st.integers(-10, 10).map(lambda power: 2.0**power))
def test_a_machine_that_is_slower_in_all_says_the_same(methods, workers, times):
    cells = study(methods, workers, (16, 32))
    parts = ("epoch", "forward", "backward", "exposed", "update", "idle")
    seconds = [f"{part}_s" for part in parts]
    slower = [
        one.model_copy(
            update={name: times * getattr(one, name) for name in seconds}
            | {"spread": (times * one.epoch_s, times * one.epoch_s)}
        )
        for one in cells
    ]
    first, second = comparable(cells), comparable(slower)
    assert [limit(first, one) for one in first] == [limit(second, one) for one in second]
    for one, other in zip(first, second, strict=True):
        assert gains(one) == pytest.approx(gains(other))


def test_a_process_that_was_fullest_before_its_steps_does_not_hide_that_they_grow():
    law = ((16, 10), (32, 10), (64, 26))  # 10 GB at the start; a step has half a GB a sample
    cells = [cell(batch=size, memory_bytes=full * 10**9) for size, full in law]
    known = comparable(cells)
    assert memory_of(known, known[0]).sample_bytes == 0.5e9


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
