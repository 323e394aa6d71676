"""The sentences below a table of plans: each where it is right, and where it would be wrong."""

import pytest

from boxes import box, chain, link
from paceline.planner import Refusal, search
from paceline.records.result import RankingRows
from paceline.report.terminal import plan_sentences
from paceline.strategies import find_exchange
from plan_rows import plan_row


def rows(*plans, refused=()) -> RankingRows:
    return RankingRows(
        plans=plans, refused=refused, workers_worth=None, workers_sentence=None, advice=None
    )


def refusals(*plans, refused) -> list[str]:
    return [
        one
        for one in plan_sentences(rows(*plans, refused=refused), is_measured=True)
        if "refused" in one
    ]


@pytest.mark.parametrize(("workers", "counted"), [(1, "1 worker"), (2, "2 workers")])
def test_the_refused_are_counted_in_plain_english(workers: int, counted: str) -> None:
    refused = (Refusal("tree", workers, "as listed", "too large"),)
    assert refusals(refused=refused) == [f"tree is refused on {counted}: too large"]


def test_of_each_strategy_the_first_refusal_is_said() -> None:
    refused = (
        Refusal("tree", 2, "as listed", "first"),
        Refusal("tree", 4, "as listed", "second"),
        Refusal("wheel", 2, "as listed", "no head"),
    )
    assert sorted(refusals(refused=refused)) == [
        "tree is refused on 2 workers: first",
        "wheel is refused on 2 workers: no head",
    ]


def test_what_is_planned_elsewhere_is_not_refused_altogether() -> None:
    refused = (Refusal("allreduce", 2, "as listed", "too large"),)
    placed = plan_row(placement="spread")
    assert refusals(placed, refused=refused) == [
        "allreduce is refused on 2 workers (as listed): too large"
    ]
    # As with other workers: nothing is planned on two.
    fewer = plan_row(workers=1)
    assert refusals(fewer, refused=refused) == ["allreduce is refused on 2 workers: too large"]


def test_a_strategy_of_which_something_is_planned_there_is_refused_in_part() -> None:
    refused = (Refusal("hogbatch", 2, "as listed", "cpu_gpu: needs both"),)
    planned = plan_row(strategy="hogbatch")
    assert refusals(planned, refused=refused) == [
        "a variant of hogbatch is refused on 2 workers (as listed): cpu_gpu: needs both"
    ]


def test_a_search_that_finds_room_on_other_devices_says_which_have_none() -> None:
    work = chain((1.0, 4_000_000))  # parameters, gradients and momentum take 12 MB
    three = box("cpu", "cpu", "cpu", links=[link("h", "h", 1e9)])
    small, *others = three.devices
    small = small.model_copy(update={"memory_bytes": 1_000_000})
    faster = [one.model_copy(update={"flops_per_s": 2e9}) for one in others]
    machine = three.model_copy(update={"devices": (small, *faster)})
    found = search(lambda _: work, machine, [find_exchange("allreduce")], 8, 2)
    assert {one.placement for one in found} == {"fastest"}
    sentences = list(plan_sentences(RankingRows.of(found), is_measured=True))
    assert any(
        one.startswith("allreduce is refused on 2 workers (as listed): cpu0 needs 0.012 GB")
        for one in sentences
    )


def test_a_range_is_said_to_be_meant_for_medians_and_only_where_there_is_one() -> None:
    *_, last = plan_sentences(rows(plan_row()), is_measured=True)
    assert last == (
        "the range beside a step (±) is meant to hold the median of the measured steps in 9 of 10 "
        "cases"
    )
    refused = (Refusal("tree", 2, "as listed", "too large"),)
    assert len(list(plan_sentences(rows(refused=refused), is_measured=True))) == 1  # the refusal
    # A file's own figures of a device may be wrong by any factor, for this model or for all.
    *_, last = plan_sentences(rows(plan_row()), is_measured=False)
    assert last.startswith("the range beside a step (±) is of exchanging and waiting; ")
    assert last.endswith(" machine file: say what one of them makes by --measured 350/s")
