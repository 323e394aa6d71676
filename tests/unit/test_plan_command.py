"""`paceline plan`: its JSON object, tables, figures, and the files that it writes."""

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import paceline
from boxes import box, chain, link
from command_line import MACHINE
from paceline.core.cost import Roofline
from paceline.core.losses import BUSY, Losses
from paceline.core.settings import TrainSettings
from paceline.core.strategy import PricedMachine, Role, Running
from paceline.exchange.session import TrainingSession
from paceline.links.group import Group
from paceline.record.trace import read_timeline
from paceline.records.result import PlanResult, RankingRows, read_result
from paceline.runs.restarts import RunRequest
from paceline.runs.session import go_through
from paceline.strategies import STRATEGIES

GIGABIT = "two-hosts-gigabit"
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def plan(line):
    """Plan, and return the object that --json prints."""
    return lambda model, machine, *more: (
        line("plan", model, "--machine", machine, *more, "--json").found
    )


def test_the_command_prints_the_plan_of_the_function(plan):
    arguments = {"strategy": "host", "options": {"chunk": 3}, "workers": 2, "batch_size": 32}
    rows = RankingRows.of(paceline.plan("lenet5", "2xv100", **arguments)).model_dump(mode="json")
    asked = ("--strategy", "host", "--strategy-option", "chunk=3", "--workers", 2)
    found = plan("lenet5", "2xv100", *asked, "--batch-size", 32)
    assert {name: found[name] for name in rows} == rows
    assert found["plans"]


def test_requirements_of_a_second_machine_and_the_gain_of_a_codec_are_explained(plan):
    asked = ("--batch-size", 32, "--workers", 2, "--strategy", "allreduce")
    assert "second_machine" not in plan("alexnet", GIGABIT, *asked)
    found = plan("alexnet", GIGABIT, *asked, "--explain", "--output", "plans")
    needed = found["second_machine"]
    by_exchange = {one["exchange"]: one for one in needed["requirements"]}
    assert list(by_exchange) == ["plain", "codec", "local"]
    assert "rounding" in {one["code"] for one in found["findings"]}
    # 1 Gbit/s is too slow for all gradients, and fast enough for a quarter.
    assert by_exchange["plain"]["speed"] is None
    assert by_exchange["plain"]["bits_per_s"][0] > 1e9 > by_exchange["codec"]["bits_per_s"][0]
    kept = read_result(Path(found["folder"]))
    assert isinstance(kept, PlanResult)
    assert kept.model_dump(mode="json")["second_machine"] == needed
    assert 'id="figure-second-machine"' in Path(found["folder"], "report.html").read_text()
    assert "second_machine" not in plan("lenet5", MACHINE, "--explain")  # a machine with one host


def test_an_empty_plan_is_printed_with_exit_code_2(line):
    asked = ("--strategy-option", "codec=threshold:0.001")  # the share is not declared
    asked += ("--strategy", "allreduce", "--workers", 2, "--json")
    line("plan", "alexnet", "--machine", GIGABIT, *asked)
    found = json.loads(line.out)
    assert (line.code, found["plans"], len(found["refused"])) == (2, [], 1)


def test_a_plan_is_drawn_and_swept(line, plan):
    asked = ("--batch-size", 32, "--workers", 2)
    line("plan", "alexnet", "--machine", GIGABIT, *asked, "--explain")
    assert line.code == 0
    assert re.search(r"cpu0/compute \|L?F+.*B+.*U+\|", line.out)
    swept = ("--strategy", "allreduce,tree", "--sweep", "bandwidth=100M:10G")
    found = plan("lenet5", GIGABIT, *asked, *swept)
    assert found["samples_per_s"].keys() == {"allreduce", "allreduce + codec", "tree"}
    assert {len(one) for one in found["samples_per_s"].values()} == {len(found["values"])}
    one = ("--strategy", "host", "--strategy-option", "chunk=3", "--sweep", "latency=10u:1m")
    assert plan("lenet5", MACHINE, *one)["samples_per_s"].keys() == {"host"}
    assert line("plan", "lenet5", "--machine", MACHINE, *one).code == 0


def test_the_policy_of_the_docs_is_planned_and_a_missing_one_refused(line):
    text = (DOCS / "strategies" / "hogbatch.md").read_text()
    (source,) = re.findall(r"```python\n(class HalfTheFastest:.*?)```", text, re.DOTALL)
    Path("policy_of_docs.py").write_text(source)
    asked = ("mlp-64-128-10", "--machine", MACHINE, "--workers", 2, "--strategy", "hogbatch")
    for name, code in (("HalfTheFastest", 0), ("Quarter", 2)):
        line("plan", *asked, "--strategy-option", f"policy=policy_of_docs:{name}")
        assert line.code == code


def test_a_plan_is_kept_only_if_asked_and_has_a_page(plan, line, tmp_path):
    found = plan("lenet5", MACHINE, "--workers", 2)
    assert {row["strategy"] for row in found["plans"]} == STRATEGIES.keys() - {"hierarchy"}
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
    makespan_s = paceline.plan("lenet5", MACHINE)[0].timeline.makespan_s
    assert timeline.makespan_s == pytest.approx(makespan_s)
    page = (folder / "report.html").read_text()
    assert best.why in page
    assert line("report", folder).code == 0
    assert (folder / "report.html").read_text() == page
    line("plan", "lenet5", "--machine", MACHINE, "--output", "plans")
    assert "report.html" in line.out.splitlines()[-1]


# Strategies with predefined measurements, so that plans are immediate.
RANKS = replace(STRATEGIES["allreduce"], name="ranks", running=Running(__name__))
HUB = replace(
    RANKS, name="hub", running=Running(__name__, lambda config: (Role("hub", 1, leads=True),))
)


class MeasuredRun:
    """A run of a one-layer model on two equal CPU workers, whose exchange takes no time."""

    about, samples_per_step = "measured beforehand", 8.0
    workload = chain((8.0, 4_000_000))
    unrest = 0.0

    def measure(self) -> PricedMachine:
        cores = box("cpu", "cpu", links=[link("h", "h", 1e12)])
        machine = cores.model_copy(update={"losses": Losses.none("a test", self.unrest)})
        return PricedMachine(machine, Roofline.of(machine))


@contextmanager
def start(session: TrainingSession) -> Iterator[MeasuredRun]:
    """Yield the run of a session, as the module of a strategy does."""
    yield MeasuredRun()


def plan_here(strategy: str, rank: int = 0) -> None:
    settings = TrainSettings(model="net", strategy=f"{__name__}:{strategy}")
    group = replace(Group.alone(torch.device("cpu"), 5.0), rank=rank)
    go_through(RunRequest(verb="plan", settings=settings, run_id="planned"), group)


@pytest.mark.parametrize(("unrest", "percent"), [(BUSY, 13 + max(0, 100 * BUSY - 5)), (0.25, 33)])
def test_ranges_are_wider_by_what_a_machine_is_restless(
    unrest, percent, monkeypatch, caplog, capsys
):
    monkeypatch.setattr(MeasuredRun, "unrest", unrest)
    plan_here("HUB")
    assert f"±{percent:.0f} %" in capsys.readouterr().out
    warnings = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert len(warnings) == (unrest > BUSY)
    caplog.clear()
    plan_here("HUB", rank=1)  # only rank 0 warns
    assert not [one for one in caplog.records if one.levelno == logging.WARNING]
    assert not capsys.readouterr().out


def torchrun_command(capsys) -> str | None:
    """Return the command for two machines in the last line of a plan."""
    last = capsys.readouterr().out.splitlines()[-1]
    return next(iter(re.findall(r"`torchrun .* -m paceline (train .*)`", last)), None)


def test_two_machines_are_for_strategies_that_a_launcher_can_start(capsys):
    plan_here("RANKS")
    usual = torchrun_command(capsys)
    assert usual is not None
    assert "--strategy" not in usual
    plan_here("HUB")  # which starts its workers itself
    assert torchrun_command(capsys) is None
