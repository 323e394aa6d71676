"""What a study says of cells whose law is known."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.outcome import Insight
from paceline.records.scale import ScaleCell
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
    assert said(cells, "method").sentence == (
        "For net on 2 workers with a batch of 16 tree may be the fastest, 1.06 times as fast as "
        "host, but their quartiles overlap."
    )
    apart = [cells[0], cells[1].model_copy(update={"spread": (10.95, 11.0)})]
    assert "tree is the fastest" in said(apart, "method").sentence


def test_the_overhead_on_one_worker_is_table_ii():
    cells = [cell("tree", epoch_s=10.0), cell("allreduce", epoch_s=12.18)]
    sentence = said(cells, "method").sentence
    assert sentence == "For net on one worker tree costs least, and allreduce 21.8 % more."
    unsure = [cells[0].model_copy(update={"spread": (9.0, 12.5)}), cells[1]]
    assert "all methods take the same" in said(unsure, "method").sentence
    close = cell("host", epoch_s=10.1, spread=(9.9, 10.4))
    both = [cells[0].model_copy(update={"spread": (9.8, 10.2)}), close, cells[1]]
    assert said(both, "method").sentence == (
        "For net on one worker tree or host costs least, and allreduce 21.8 % more."
    )


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
        "With a batch of 16, 2 workers may pay: 1.25 times as fast as 1 worker, but their "
        "quartiles overlap."
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


def guess(method: str, workers: int, epoch_s: float, within: float = 0.13, **facts) -> ScaleCell:
    """Return a predicted cell whose range is that share of the epoch to both sides."""
    spread = ((1 - within) * epoch_s, (1 + within) * epoch_s)
    facts = {"kind": "predicted", "epoch_s": epoch_s, "spread": spread} | facts
    return cell(method, workers, **facts)


@pytest.mark.parametrize(
    ("epoch_s", "told"),
    [
        (10.1, "tree and host are equally fast, within what the figures can tell."),
        (12.9, "tree may be the fastest, 1.29 times as fast as host, but their ranges overlap."),
        # 0.87 * 13.1 s = 11.4 s, and 1.13 * 10 s = 11.3 s
        (13.1, "tree is the fastest, 1.31 times as fast as host: computation takes 9.30 s of an"),
    ],
)
def test_a_method_is_predicted_to_be_the_fastest_only_beyond_the_ranges(epoch_s, told):
    cells = [guess("tree", 2, 10.0), guess("host", 2, epoch_s)]
    sentence = said(cells, "method").sentence
    assert sentence.startswith(f"For net on 2 workers with a batch of 16 {told}")


def test_the_range_of_every_method_is_looked_at_and_not_of_the_second_alone():
    cells = [guess("tree", 2, 10.0, 0.05), guess("host", 2, 12.0, 0.05)]
    assert "tree is the fastest, 1.20 times" in said(cells, "method").sentence
    cells.append(guess("allreduce", 2, 14.0, 0.5))  # from 7 s
    assert said(cells, "method").sentence.endswith(
        "tree may be the fastest, 1.40 times as fast as allreduce, but their ranges overlap."
    )


@pytest.mark.parametrize(
    ("epochs_s", "told"),
    [
        ({1: 10.0, 2: 8.0}, "2 workers may pay: 1.25 times as fast as 1 worker, but their ranges"),
        ({1: 10.0, 2: 7.6}, "2 workers still pay: 1.32 times as fast as 1 worker, 66 %"),
        # 16 take 22.8 to 29.7 s, and 8 28.3 to 36.7 s.
        (
            {1: 120.0, 8: 32.5, 16: 26.25},
            "16 workers may pay: 4.57 times as fast as 1 worker; 8 may do as well, for their "
            "ranges overlap.",
        ),
        # The fewest that may do as well, where two numbers may.
        (
            {1: 120.0, 2: 60.0, 3: 55.0, 4: 50.0},
            "4 workers may pay: 2.40 times as fast as 1 worker; 2 may do as well",
        ),
        (
            {1: 10.0, 2: 11.0},
            "1 worker may be enough; 2 may lose 9 %, but their ranges overlap.",
        ),
        ({1: 10.0, 2: 9.99}, "1 worker may be enough; 2 may be as fast."),
        ({1: 10.0, 2: 13.5}, "1 worker is enough; 2 would lose 26 %."),
        # Another number than the last may pay.
        ({1: 10.0, 2: 9.8, 3: 20.0}, "1 worker may be enough; 3 would lose 50 %."),
        (
            {2: 10.0, 4: 5.0, 8: 4.9},
            "4 workers still pay: 2.00 times as fast as 2 workers, 100 % of what as many would "
            "reach without losses; 8 may gain 2 %, but their ranges overlap.",
        ),
    ],
)
def test_workers_are_predicted_to_pay_only_beyond_the_ranges(epochs_s, told):
    cells = [guess("tree", workers, epoch_s) for workers, epoch_s in epochs_s.items()]
    assert said(cells, "workers").sentence.startswith(f"With a batch of 16, {told}")


EPOCHS = st.floats(1, 100)
SHARES = st.floats(0, 0.7)


@given(EPOCHS, EPOCHS, SHARES, SHARES)
def test_what_is_said_for_sure_holds_wherever_the_epochs_lie_in_their_ranges(
    one_s, other_s, one_share, other_share
):
    """The worst case is the oracle: the faster at the end of its range, the other at its start."""
    faster, slower = sorted([(one_s, one_share), (other_s, other_share)])
    if faster[0] * (1 + faster[1]) < slower[0] * (1 - slower[1]):
        return
    method = said([guess("tree", 2, *faster), guess("host", 2, *slower)], "method").sentence
    assert "is the fastest" not in method
    cells = [guess("tree", 1, one_s, one_share), guess("tree", 2, other_s, other_share)]
    workers = said(cells, "workers").sentence
    assert not any(verb in workers for verb in ("still pay", "seem to", "would"))
    assert "may" in workers


@pytest.mark.parametrize(("epoch_s", "limit"), [(16.0, "Computation"), (12.0, "Memory")])
def test_memory_limits_only_where_a_larger_batch_is_sure_to_pay(epoch_s, limit):
    facts = {"workers": 1, "capacity_bytes": 8.9e9}
    cells = [
        guess("tree", epoch_s=20.0, batch=16, memory_bytes=3 * 10**9, **facts),
        guess("tree", epoch_s=epoch_s, batch=32, memory_bytes=5 * 10**9, **facts),
    ]
    assert said(cells, "limit").sentence.startswith(f"{limit} limits")


@pytest.mark.parametrize("scaling", ["strong", "weak"])
def test_a_loss_within_the_quartiles_is_said_to_be_one(scaling: str):
    epochs = 2 if scaling == "weak" else 1  # of one worker's samples, by two
    base = cell("tree", epoch_s=10.0, spread=(9.0, 10.4), scaling=scaling)
    for least_s, unsure in ((10.2, True), (10.5, False)):
        spread = (least_s * epochs, 12.0 * epochs)
        more = cell("tree", 2, epoch_s=11.0 * epochs, spread=spread, scaling=scaling)
        sentence = said([base, more], "workers").sentence
        loss = "may lose 9 %, but their quartiles overlap" if unsure else "would lose 9 %"
        assert sentence.endswith(f"1 worker is enough; 2 {loss}.")


def test_weak_scaling_counts_the_samples_that_grow():
    found = said(study({"tree": 25}, (1, 4), scaling="weak"), "workers")
    # Four times the samples in 125 s for 100 s.
    assert "4 workers still pay: 3.20 times as fast" in found.sentence
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
