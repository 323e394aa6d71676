"""Plans in a terminal: the tables, the recommended command, and the metrics of a ranking."""

import re
from io import StringIO

import pytest
from rich.console import Console

from paceline.core.strategy import StepsToLoss
from paceline.planner import Refusal
from paceline.planner.second_machine import Requirement, SecondMachine
from paceline.records.result import PlanResult, PlanRow, RankingRows
from paceline.report.metrics import of_ranking
from paceline.report.plans import Form, command, explanation, of_second_machine, present
from paceline.strategies.host.config import HostReduce
from plan_rows import plan_row

LEARNS = StepsToLoss(1.25, 1.1, 1.4, "a GPT")


def ranking(*plans: PlanRow, **facts: object) -> RankingRows:
    usual = {"refused": (), "workers_worth": None, "alone_samples_per_s": None}
    return RankingRows(plans=plans, **usual | facts)


def plan_result(*plans: PlanRow, **facts: object) -> PlanResult:
    rows = ranking(*plans, **facts)
    return PlanResult(id="a", model="net", machine="m", batch_size=64, facts={}, ranking=rows)


def printed(result: PlanResult, form: Form = "text", drawing: str = "") -> list[str]:
    """Return the lines that a terminal of 80 columns shows."""
    out = Console(file=StringIO(), width=80)
    present(out, result, "title", None, form=form, drawing=drawing)
    return out.file.getvalue().splitlines()


def test_two_tables_show_the_fastest_of_each_strategy_with_a_codec_and_without():
    rows = [
        plan_row(strategy=name, codec=codec, workers=workers)
        for name in ("allreduce", "host", "tree")
        for codec in ("dynamic8", "half", None, "bfloat16")
        for workers in (4, 2)
    ]
    rows.append(plan_row(strategy="allreduce", workers=1))
    rows.append(plan_row(strategy="wheel", is_same_training=False))
    rows.append(plan_row(strategy="local", is_same_training=False, steps_to_loss=LEARNS))
    lines = printed(plan_result(*rows, alone_samples_per_s=2909.0))
    assert max(map(len, lines)) <= 80 or len(lines) <= 15
    table = [line.split() for line in lines if "±" in line]
    assert [row[:4] if row[1] == "+" else row[:2] for row in table] == [
        ["allreduce", "+", "dynamic8", "4"],
        ["allreduce", "4"],
        ["host", "+", "dynamic8", "4"],
        ["host", "4"],
        ["allreduce", "1"],
        ["wheel", "2"],
        ["local", "2"],
    ]
    assert table[0][-1] == "2.00"  # 5,818 samples/s of two workers, 2,909 of one
    assert [row[-1] for row in table[-2:]] == ["unknown", "x"]
    assert table[-1][-2:] == ["1.10-1.40", "x"]


TRAIN = "paceline train net --batch-size 64 --strategy"


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (plan_row(strategy="host", codec="dynamic8", config={"codec": "dynamic8", "chunk": 4}),
         f"{TRAIN} host --workers 2 --codec dynamic8"),
        (plan_row(strategy="local", config={"sync_every": 77, "codec": None}),
         f"{TRAIN} local --workers 2 --strategy-option sync_every=77"),
        (plan_row(is_balanced=True, config={}), f"{TRAIN} allreduce --workers 2 --balance auto"),
        (plan_row(config={}, workers=4, hosts=2),
         "on each host, torchrun --nnodes 2 --nproc-per-node 2 --node-rank N --master-addr HOST "
         f"-m {TRAIN} allreduce"),
    ],
)  # fmt: skip
def test_the_recommended_command_has_the_options_of_the_plan(plan, expected):
    assert HostReduce().codec is None  # so the command must name the codec
    assert command(plan, plan_result(plan)) == expected


def test_markdown_has_the_same_rows_as_the_terminal():
    rows = (plan_row(), plan_row(strategy="host"), plan_row(strategy="tree"))
    result = plan_result(*rows, alone_samples_per_s=2909.0)
    rows = [line for line in printed(result, "markdown") if line.startswith("|")]
    assert rows[1] == "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    shown = [line.split() for line in printed(result) if "±" in line]
    assert [row.replace("|", " ").split() for row in rows[2:]] == shown


def test_no_command_recommends_a_strategy_that_can_only_be_planned():
    assert not any(
        "paceline train" in line for line in printed(plan_result(plan_row(strategy="hierarchy")))
    )
    assert any("paceline train" in line for line in printed(plan_result(plan_row())))


def test_the_best_same_training_is_recommended_before_a_faster_other():
    other = plan_row(strategy="wheel", is_same_training=False, samples_per_s=9e9)
    assert ranking(other, plan_row()).recommended == plan_row()
    assert ranking(other).recommended == other
    assert ranking().recommended is None


@pytest.mark.parametrize(
    ("rates", "needless"),
    [
        ({1: 100, 2: 101}, 1 / 2),
        ({1: 100, 2: 150, 4: 75}, 1 / 2),
        ({1: 100, 2: 103}, 0.0),
        ({2: 9}, None),
    ],
)
def test_workers_that_add_no_throughput_are_needless(rates, needless):
    best_first = sorted(rates.items(), key=lambda one: -one[1])
    rows = [plan_row(workers=n, samples_per_s=rate) for n, rate in best_first]
    assert of_ranking(ranking(*rows), is_measured=True).values.get("needless_workers") == needless


def test_the_ranges_of_the_best_two_strategies_may_overlap():
    best = plan_row(step_s=1.0, range_share=0.1)
    # The best takes at most 1.1 s, the others at least 1.08 and 1.17 s.
    for step_s, overlaps in ((1.2, True), (1.3, False)):
        other = plan_row(strategy="tree", step_s=step_s, range_share=0.1)
        found = of_ranking(ranking(best, other), is_measured=True).values
        assert (found["ranges_overlap"] > 0) is overlaps


def test_a_strategy_that_changes_training_is_compared_by_the_time_to_a_loss():
    best = plan_row(samples_per_s=100)
    local = plan_row(
        strategy="local", samples_per_s=250, is_same_training=False, steps_to_loss=LEARNS
    )
    found = of_ranking(ranking(best, local), is_measured=True).values
    assert found["other_training_saves"] == pytest.approx(1 - 100 / (250 / 1.25))


def test_savings_by_a_codec_are_a_metric_only_if_the_best_plan_has_it():
    encoded, half = (plan_row(codec=codec, step_s=0.5) for codec in ("dynamic8", "half"))
    # The fastest plan without a codec may have another strategy and number of workers.
    plain = plan_row(strategy="host", workers=1, step_s=1.0)
    slower, other = plan_row(step_s=2.0), plan_row(strategy="wheel", step_s=0.75)
    for plans, saves in (
        ((encoded, half, other, plain, slower), 0.5),
        ((plain, encoded), None),
        ((encoded, half), None),
    ):
        found = of_ranking(ranking(*plans), is_measured=True)
        assert found.values.get("codec_saves") == saves


def test_the_slowest_second_machine_and_link_are_explained_in_one_line_each():
    local = Requirement("local", 0.05, (1e7,), is_learning_known=False)
    rows = Requirement("plain", None, (5e9,)), Requirement("codec", 0.54, (None,)), local
    speeds, links = of_second_machine(SecondMachine("h", 1.0, (1.0,), rows))
    shown = [
        re.findall(r"none|[0-9]+ (?:%|[MG]bit/s)(?: or less)?", one) for one in (speeds, links)
    ]
    assert shown == [["none", "54 %", "5 %"], ["5 Gbit/s", "none", "10 Mbit/s or less"]]
    assert [one.count("unknown") for one in (speeds, links)] == [1, 1]


SPREAD = plan_row(strategy="tree", placement="spread")


@pytest.mark.parametrize(
    ("planned", "workers", "line"),
    [
        ([], 1, "tree is refused on 1 worker"),
        ([], 2, "tree is refused on 2 workers"),
        ([plan_row(strategy="tree", workers=1)], 2, "tree is refused on 2 workers"),
        # A plan exists on other devices, or of another variant on these devices.
        ([SPREAD], 2, "tree is refused on 2 workers (as listed)"),
        ([plan_row(strategy="tree")], 2, "a variant of tree is refused on 2 workers (as listed)"),
    ],
)
def test_the_first_refusal_of_a_strategy_is_explained(planned, workers, line):
    refused = (Refusal("tree", workers, "as listed", "why"), Refusal("tree", 4, "as listed", "b"))
    refused += (Refusal("wheel", 2, "as listed", "no head"),)
    told = list(explanation(ranking(*planned, refused=refused)))
    assert f"{line}: why" in told
    assert len([one for one in told if "refused" in one]) == 2
