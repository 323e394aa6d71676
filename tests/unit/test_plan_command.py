"""`paceline plan`: one object for programs, a table for people, and what it keeps."""

import json
import logging
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import measured_runs
import paceline
from command_line import MACHINE
from paceline.core.losses import BUSY
from paceline.core.settings import TrainSettings
from paceline.links.group import Group
from paceline.record.trace import read_timeline
from paceline.records.result import PlanResult, RankingRows, read_result
from paceline.runs.restarts import RunRequest
from paceline.runs.session import go_through
from paceline.strategies import STRATEGIES

GIGABIT = "two-hosts-gigabit"
ALEXNET_NBYTES = 4 * 60_965_224  # of gradients: Krizhevsky 2012 in one column
GIGABIT_FILE = MACHINE.parent / "two-hosts-gigabit.toml"
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def plan(line):
    """Plan, and return the object that --json prints."""
    return lambda model, machine, *more: (
        line("plan", model, "--machine", machine, *more, "--json").found
    )


def test_all_strategies_and_numbers_of_workers_are_planned_best_first(plan):
    found = plan("alexnet", MACHINE, "--batch-size", 32)
    assert (found["model"], found["batch_size"], found["origin"]) == ("alexnet", 32, "predicted")
    rates = [row["samples_per_s"] for row in found["plans"]]
    assert rates == sorted(rates, reverse=True)
    both = [row for row in found["plans"] if row["workers"] == 2]
    assert {row["strategy"] for row in both} == STRATEGIES.keys() - {"hierarchy"}
    # Ranks of one host sum in its memory, where nothing is encoded.
    assert {row["codec"] for row in both if row["strategy"] == "host"} == {None}
    plain = {
        row["workers"]: row
        for row in found["plans"]
        if (row["strategy"], row["codec"]) == ("allreduce", None)
    }
    wire = {workers: row["wire_nbytes_per_step"] for workers, row in plain.items()}
    assert wire == {1: 0, 2: 2 * ALEXNET_NBYTES}  # two ranks send all through one link
    for row in plain.values():
        assert row["samples_per_s"] == pytest.approx(32 / row["step_s"])


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ((), {}),
        (("--workers", 2, "--batch-size", 32), {"workers": 2, "batch_size": 32}),
        (("--strategy", "host,tree"), {"strategies": ["host", "tree"]}),
        (
            ("--strategy", "host", "--set", "chunk=3", "--workers", 2),
            {"strategy": "host", "options": {"chunk": 3}, "workers": 2},
        ),
        (("--measured", "350/s@16"), {"measured": "350/s@16"}),
        (("--precision", "bfloat16"), {"precision": "bfloat16"}),
    ],
)
def test_the_command_prints_the_plan_of_the_function(plan, options, arguments):
    rows = RankingRows.of(paceline.plan("lenet5", "2xv100", **arguments)).model_dump(mode="json")
    found = plan("lenet5", "2xv100", *options)
    assert {name: found[name] for name in rows} == rows
    assert found["plans"]


def at_rate(plan, rate: str, *more: object) -> dict:
    """Plan AlexNet on two hosts of one core each, joined by a link of that rate."""
    text = GIGABIT_FILE.read_text()
    assert "117 MB/s" in text
    Path("hosts.toml").write_text(text.replace("117 MB/s", rate))
    return plan("alexnet", "hosts.toml", "--batch-size", 32, *more)


def test_a_codec_is_advised_where_the_link_is_slow(plan):
    found = at_rate(plan, "11.7 MB/s", "--workers", 2, "--strategy", "allreduce,host,tree")
    steps = {(row["strategy"], row["codec"]): row["step_s"] for row in found["plans"]}
    assert steps["allreduce", "half"] == steps["allreduce", "bfloat16"]
    fastest = min(steps, key=steps.__getitem__)
    plain = min((key for key in steps if key[1] is None), key=steps.__getitem__)
    advice = found["advice"]
    assert (advice["pays"], advice["workers"], advice["plain_workers"]) == (True, 2, 2)
    assert (advice["strategy"], advice["codec"], advice["step_s"]) == (*fastest, steps[fastest])
    assert (advice["plain_strategy"], advice["plain_step_s"]) == (plain[0], steps[plain])
    # The gradients at that rate, and all of 8 buckets' latencies.
    wire_s = ALEXNET_NBYTES / 11.7e6
    assert advice["link_busy"] * advice["plain_step_s"] == pytest.approx(wire_s, rel=5e-3)


def test_a_plan_of_nothing_is_printed_and_ends_with_code_2(line):
    asked = ("--strategy", "allreduce", "--workers", 2, "--set", "codec=threshold:0.001", "--json")
    line("plan", "alexnet", "--machine", GIGABIT, *asked)  # the share is not declared
    found = json.loads(line.out)
    assert (line.code, found["plans"], len(found["refused"])) == (2, [], 1)


def test_a_plan_is_drawn_and_swept(line, plan):
    asked = ("--batch-size", 32, "--workers", 2)
    line("plan", "alexnet", "--machine", GIGABIT, *asked, "--explain")
    assert line.code == 0
    assert re.search(r"cpu0/compute \|L?F+.*B+.*U+\|", line.out)
    swept = ("--strategy", "allreduce,tree", "--sweep", "bandwidth=100M:10G")
    found = plan("lenet5", GIGABIT, *asked, *swept)
    assert (found["values"][0], found["values"][-1]) == (1e8, pytest.approx(1e10))
    assert found["samples_per_s"].keys() == {"allreduce", "allreduce + codec", "tree"}
    assert len(found["samples_per_s"]["allreduce + codec"]) == len(found["values"])
    assert len(found["best"]) >= 1
    one = ("--strategy", "host", "--set", "chunk=3", "--sweep", "latency=10u:1m")
    assert plan("lenet5", MACHINE, *one)["samples_per_s"].keys() == {"host"}
    line("plan", "lenet5", "--machine", MACHINE, *one)
    assert (line.code, line.err) == (0, "")


def test_the_policy_of_the_docs_is_planned_and_one_that_it_lacks_refused(line):
    text = (DOCS / "hogbatch.md").read_text()
    (source,) = re.findall(r"```python\n(class HalfTheFastest:.*?)```", text, re.DOTALL)
    Path("policy_of_docs.py").write_text(source)
    asked = ("mlp-64-128-10", "--machine", MACHINE, "--workers", 2, "--strategy", "hogbatch")
    for name, code in (("HalfTheFastest", 0), ("Quarter", 2)):
        line("plan", *asked, "--set", f"policy=policy_of_docs:{name}")
        assert line.code == code


def test_a_plan_is_kept_only_if_asked_and_has_a_page(plan, line, tmp_path):
    plan("lenet5", MACHINE)
    assert list(tmp_path.iterdir()) == []
    printed = plan("lenet5", MACHINE, "--output", "plans")
    folder = Path(printed.pop("folder"))
    assert folder.parent == Path("plans")
    assert {path.name for path in folder.iterdir()} == {"result.json", "trace.json", "report.html"}
    kept = read_result(folder)
    assert isinstance(kept, PlanResult)
    ranking = kept.ranking.model_dump(mode="json")
    assert ranking == {name: printed[name] for name in ranking}
    best = kept.ranking.plans[0]
    timeline = read_timeline(folder / "trace.json", "predicted")
    again = paceline.plan("lenet5", MACHINE)[0]
    assert (again.strategy, again.step_s) == (best.strategy, best.step_s)
    assert timeline.makespan_s == pytest.approx(again.timeline.makespan_s)
    page = (folder / "report.html").read_text()
    assert best.why in page
    assert line("report", folder).code == 0
    assert (folder / "report.html").read_text() == page
    line("plan", "lenet5", "--machine", MACHINE, "--output", "plans")
    assert "report.html" in line.out.splitlines()[-1]


def plan_here(strategy: str, *, rank: int = 0, model: str = "net") -> None:
    settings = TrainSettings(model=model, strategy=f"measured_runs:{strategy}")
    group = replace(Group.alone(torch.device("cpu"), 5.0), rank=rank)
    go_through(RunRequest(verb="plan", settings=settings, run_id="planned"), group)


@pytest.mark.parametrize(
    ("unrest", "percent"), [(0.0, 13), (BUSY, 13 + max(0, 100 * BUSY - 5)), (0.25, 33)]
)
def test_ranges_are_wider_by_what_a_machine_is_restless(
    unrest, percent, monkeypatch, caplog, capsys
):
    monkeypatch.setattr(measured_runs, "unrest", unrest)
    plan_here("HUB")
    assert f"±{percent:.0f} %" in capsys.readouterr().out
    warnings = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert len(warnings) == (unrest > BUSY)
    caplog.clear()
    plan_here("HUB", rank=1)  # which need not say it again
    assert not [one for one in caplog.records if one.levelno == logging.WARNING]
    assert not capsys.readouterr().out


def launch_command(capsys) -> str | None:
    """Return the command for two machines in the last line of a plan of this one."""
    last = capsys.readouterr().out.splitlines()[-1]
    return next(iter(re.findall(r"`paceline (launch .*)` ", last)), None)


def test_two_machines_are_for_strategies_that_a_launcher_can_start(line, capsys):
    plan_here("RANKS")
    usual = launch_command(capsys)
    assert usual is not None
    assert "--strategy" not in usual
    plan_here("HUB")  # which starts its workers itself
    assert launch_command(capsys) is None
    plan_here("HUB_OF_RANKS", model="lenet5")
    line(*shlex.split(launch_command(capsys)))
    assert line.code == 0, line.err
    commands = [one for one in line.out.splitlines() if one.startswith("torchrun ")]
    assert len(commands) == 2
    for rank, one in enumerate(commands):
        assert f" --node-rank {rank} --master-addr ADDRESS " in one
        assert " train lenet5 --strategy measured_runs:HUB_OF_RANKS --workers 2 " in one
