"""Findings and notes about plans: each kind where it is right, and where it would be wrong."""

import pytest

from findings import COMPUTES, by_topic, codes, numbers, run, said
from paceline.core.after_backward import AfterBackward
from paceline.core.errors import InvalidInput
from paceline.core.outcome import Insight
from paceline.planner import Refusal
from paceline.records.result import AdviceRow, PlanRow, RankingRows
from paceline.records.settings import validated_rehearsal
from paceline.report.insights import verdict
from paceline.report.planned import of_plan
from paceline.report.terminal import plan_sentences
from paceline.strategies import EXCHANGES, STRATEGIES
from plan_rows import plan_row


def advice(pays: bool) -> AdviceRow:
    facts = {"pays": pays, "codec": "dynamic8", "link_busy": 0.75, "sentence": "about codecs"}
    plans = {"strategy": "allreduce", "workers": 2, "step_s": 0.5}
    plain = {f"plain_{name}": value for name, value in plans.items()}
    return AdviceRow(**facts, **plans, **plain | {"plain_step_s": 1.0})


def ranking(*plans: PlanRow, **facts: object) -> RankingRows:
    usual = {"refused": (), "workers_worth": None, "workers_sentence": None, "advice": None}
    return RankingRows(plans=plans, **usual | facts)


def found(*plans: PlanRow, **facts: object) -> dict[str, Insight]:
    return by_topic(of_plan(ranking(*plans, **facts)))


@pytest.mark.parametrize(
    ("plans", "pays", "code"),
    [
        ([plan_row(codec="dynamic8"), plan_row()], True, "codec"),
        ([plan_row(exposed_s=0.0)], False, "exchange_hidden"),
        ([plan_row()], None, "faster_exchange"),  # nobody knows the speed of codecs
        # It pays for whole replicas, and these are slower than the best plan all the same.
        ([plan_row(strategy="wheel"), plan_row(codec="dynamic8")], True, "rehearse"),
    ],
)
def test_a_codec_is_what_to_change_only_for_the_best_plan(plans, pays, code):
    change = found(*plans, advice=None if pays is None else advice(pays))["change"]
    assert change.code == f"change.{code}"
    assert ("75.0 % of a plain step" in dict(change.figures).values()) is (code == "codec")
    assert ("about codecs" in change.sentence.lower()) is (pays is not None)


def rehearses(name: str) -> bool:
    """Whether the command takes it."""
    try:
        validated_rehearsal({"model": "lenet5", "device": "p100", "strategy": name})
    except InvalidInput:
        return False
    return True


@pytest.mark.parametrize("name", [*sorted(STRATEGIES.keys() - EXCHANGES.keys()), "users_own"])
def test_what_can_be_tried_is_to_be_tried_in_the_way_that_it_can(name: str):
    change = found(plan_row(strategy=name))["change"]
    only = "cannot_run" if name == "hierarchy" else "train_shortly"
    assert change.code == f"change.{'rehearse' if rehearses(name) else only}"
    assert name in change.sentence
    close = found(plan_row(strategy=name), plan_row(samples_per_s=5800))["method"]
    assert close.code == ("plans.close.rehearse" if rehearses(name) else "plans.close")


def test_the_best_beside_the_best_other():
    best = plan_row(step_s=1, samples_per_s=100, exposed_s=0.2)
    other = plan_row(strategy="tree", step_s=2, samples_per_s=50)
    facts = {"workers_worth": 2, "workers_sentence": "2 of them"}
    rows = list(of_plan(ranking(best, other, **facts)))
    assert [(one.code, numbers(one.sentence)) for one in rows] == [
        ("plans.best", [2, 100, 2.0, 2]),
        ("limit.best_plan", [90.0, 90]),
        ("change.faster_exchange", [800, 1.0, 1.25]),
        ("workers.worth", [2]),
        ("memory.fullest", [1.0]),
    ]
    assert rows[1].figures == (("exposed communication", "200 ms"), ("efficiency", "90.0 %"))
    assert rows[3].figures == (("2 workers", "100 samples/s"),)
    assert "cpu0" in rows[4].sentence
    # An exchange that hides is not what to change; nor are devices: more may be what helps.
    hidden = found(plan_row(step_s=1, exposed_s=0.02))
    assert hidden["change"].code == "change.exchange_hidden"
    assert numbers(hidden["change"].sentence) == [1.02]
    assert "workers" not in hidden  # they were not compared


@pytest.mark.parametrize(
    ("reached", "grade"),
    [(1.0, "Good"), (0.9, "Good"), (0.89, "Fair"), (0.7, "Fair"), (0.69, "Poor"), (0.1, "Poor")],
)
def test_a_plan_is_as_good_as_what_it_reaches(reached: float, grade: str):
    assert verdict(reached) == grade
    assert found(plan_row(efficiency=reached))["limit"].sentence.startswith(grade)
    unknown = found(plan_row(efficiency=None))["limit"]  # the speed of the devices alone
    assert [name for name, _ in unknown.figures] == ["exposed communication"]
    assert numbers(unknown.sentence) == [90]


def test_what_exchanges_leave_after_backward_stands_with_its_figures():
    left = {"host": 0.001, "tree": 0.04}
    rows = [
        plan_row(strategy=name, after_backward=AfterBackward(0.1, 0.0, s, 0.1 + s, "it does"))
        for name, s in left.items()
    ]
    exchange = found(*rows)["exchange"]
    assert exchange.code == "exchange.left"
    assert exchange.figures == (("left with host", "1.00 ms"), ("left with tree", "40.0 ms"))
    assert said(run(COMPUTES, *rows))["exchange"] == exchange


SPREAD = plan_row(strategy="tree", placement="spread")


@pytest.mark.parametrize(
    ("planned", "workers", "line"),
    [
        ([], 1, "tree is refused on 1 worker"),
        ([], 2, "tree is refused on 2 workers"),
        ([plan_row(strategy="tree", workers=1)], 2, "tree is refused on 2 workers"),
        # Something is planned there: on other devices, or another variant on these.
        ([SPREAD], 2, "tree is refused on 2 workers (as listed)"),
        (
            [plan_row(strategy="tree")],
            2,
            "a variant of tree is refused on 2 workers (as listed)",
        ),
    ],
)
def test_the_first_refusal_of_a_strategy_is_said_and_where(planned, workers, line):
    refused = (Refusal("tree", workers, "as listed", "why"), Refusal("tree", 4, "as listed", "b"))
    refused += (Refusal("wheel", 2, "as listed", "no head"),)
    told = list(plan_sentences(ranking(*planned, refused=refused), is_measured=True))
    others = [one for one in told if one.startswith("wheel")]
    assert f"{line}: why" in told
    assert len(told) == 2 + bool(planned)  # of each strategy one, and the note about ranges
    assert len(others) == 1
    assert codes(of_plan(ranking(refused=refused))) == ["plans.none"]


@pytest.mark.parametrize("is_measured", [True, False])
def test_what_a_range_holds_depends_on_who_says_how_fast_devices_are(is_measured):
    (sentence,) = plan_sentences(ranking(plan_row()), is_measured=is_measured)
    assert (numbers(sentence)[:2] == [9, 10]) is is_measured
    assert ("--measured" in sentence) is not is_measured
    assert list(plan_sentences(ranking(), is_measured=is_measured)) == []
