"""What a plan's page advises: each sentence where it is right, and where it would be wrong."""

import pytest

from paceline.core.errors import InvalidInput
from paceline.core.outcome import Insight
from paceline.records.result import AdviceRow, PlanRow, RankingRows
from paceline.records.settings import validated_rehearsal
from paceline.report.planned import of_plan
from paceline.strategies import EXCHANGES, STRATEGIES
from plan_rows import plan_row


def advice(pays: bool) -> AdviceRow:
    return AdviceRow(
        pays=pays,
        codec="dynamic8",
        strategy="allreduce",
        workers=2,
        step_s=0.5,
        plain_strategy="allreduce",
        plain_workers=2,
        plain_step_s=1.0,
        link_busy=0.75,
        sentence="a codec pays: it is faster" if pays else "no codec pays: it is slower",
    )


def said(*plans: PlanRow, advice: AdviceRow | None = None) -> dict[str, Insight]:
    ranking = RankingRows(
        plans=plans, refused=(), workers_worth=None, workers_sentence=None, advice=advice
    )
    return {one.topic: one for one in of_plan(ranking)}


BUSY = ("the link is busy", "75.0 % of a plain step")


def test_a_codec_that_pays_is_what_to_change() -> None:
    change = said(plan_row(codec="dynamic8"), plan_row(), advice=advice(pays=True))["change"]
    assert change.sentence == "A codec pays: it is faster."
    assert BUSY in change.figures


def test_one_that_does_not_is_said_last() -> None:
    change = said(plan_row(exposed_s=0.0), advice=advice(pays=False))["change"]
    assert change.sentence.startswith("The exchange hides, or costs nothing: ")
    assert change.sentence.endswith(". As to codecs, no codec pays: it is slower.")
    assert BUSY not in change.figures


def test_nothing_is_said_of_codecs_whose_speed_nobody_knows() -> None:
    assert "codec" not in said(plan_row())["change"].sentence


def test_a_codec_of_another_strategy_is_not_what_to_change_of_the_best() -> None:
    """It pays for whole replicas, and these are slower than the best plan all the same."""
    best, encoded = plan_row(strategy="wheel"), plan_row(codec="dynamic8", step_s=0.02)
    plain = plan_row(step_s=0.04)
    sentence = said(best, encoded, plain, advice=advice(pays=True))["change"].sentence
    assert sentence == (
        "Rehearse wheel on 2 workers before anything is changed for it. As to codecs, a codec "
        "pays: it is faster."
    )


def rehearses(name: str) -> bool:
    """Whether the command takes it."""
    try:
        validated_rehearsal({"model": "lenet5", "device": "p100", "strategy": name})
    except InvalidInput:
        return False
    return True


@pytest.mark.parametrize("name", sorted(STRATEGIES.keys() - EXCHANGES.keys()))
def test_only_what_can_be_rehearsed_is_to_be_rehearsed(name: str) -> None:
    sentence = said(plan_row(strategy=name))["change"].sentence
    assert sentence.startswith(f"Rehearse {name} on 2 workers") is rehearses(name)
    best, other = plan_row(strategy=name), plan_row(samples_per_s=5800)
    overlap = "rehearse both" if rehearses(name) else "either may be the faster"
    assert f"; their ranges overlap: {overlap}." in said(best, other)["method"].sentence


def test_what_cannot_be_rehearsed_is_trained_with_if_it_can_be() -> None:
    for name in ("hogbatch", "of_the_users_own"):
        assert said(plan_row(strategy=name))["change"].sentence == (
            f"Train for a short time with {name} on 2 workers before anything is changed for it."
        )
    assert said(plan_row(strategy="hierarchy"))["change"].sentence == (
        "hierarchy on 2 workers can be planned, but not run here."
    )


@pytest.mark.parametrize(
    ("efficiency", "verdict"),
    [(1.0, "Good"), (0.9, "Good"), (0.89, "Fair"), (0.7, "Fair"), (0.69, "Poor"), (0.1, "Poor")],
)
def test_a_plan_is_as_good_as_what_it_reaches(efficiency: float, verdict: str) -> None:
    limit = said(plan_row(efficiency=efficiency))["limit"]
    assert limit.sentence == (
        f"{verdict}: it reaches {efficiency:.1%}".replace("%", " %")
        + " of what its devices would on their own; it computes 90 % of the step."
    )
    assert ("efficiency", f"{100 * efficiency:.1f} %") in limit.figures


def test_a_plan_of_devices_whose_own_speed_is_not_known_is_not_judged() -> None:
    limit = said(plan_row(efficiency=None))["limit"]
    assert limit.sentence == "The best plan computes 90 % of the step."
    assert [name for name, _ in limit.figures] == ["exposed communication"]
