"""Plans that are kept, runs that are compared, and what TensorBoard needs."""

import json
import sys
from pathlib import Path

import pytest

from command_line import MACHINE, write_run
from paceline.api.planning import plan
from paceline.record.trace import read_timeline
from paceline.records.result import PlanResult, read_result, read_run
from paceline.report import write_report

PLAN = ("plan", "lenet5", "--machine", MACHINE)


def test_a_plan_is_kept_and_has_a_page(line, tmp_path):
    line(*PLAN, "--output", "plans", "--json")
    assert (line.code, line.err) == (0, "")
    said = json.loads(line.out)
    folder = Path(said.pop("folder"))
    assert folder.parent == Path("plans")
    assert {path.name for path in folder.iterdir()} == {"result.json", "trace.json", "report.html"}
    kept = read_result(folder)
    assert isinstance(kept, PlanResult)
    assert kept.ranking.model_dump(mode="json") == {
        name: said[name] for name in type(kept.ranking).model_fields
    }
    best = kept.ranking.plans[0]
    timeline = read_timeline(folder / "trace.json", "predicted")
    again = plan("lenet5", MACHINE)[0]
    assert (again.strategy, again.step_s) == (best.strategy, best.step_s)
    assert timeline.makespan_s == pytest.approx(again.timeline.makespan_s)
    page = (folder / "report.html").read_text()
    for text in ("What it says", "is predicted to be the fastest", "How far it scales", best.why):
        assert text in page
    line("report", folder)
    assert line.code == 0
    assert (folder / "report.html").read_text() == page
    line(*PLAN, "--output", "plans")
    assert "report.html" in line.out.splitlines()[-1]


def test_nothing_is_kept_without_being_asked(line, tmp_path):
    line(*PLAN)
    assert line.code == 0
    assert list(tmp_path.iterdir()) == []


def change(folder: Path, **changes: object) -> None:
    """Change a run's result: its fields, or those of its settings and machine."""
    result = read_run(folder)
    for name in ("settings", "machine"):
        part = changes.pop(name, {})
        old = getattr(result, name)
        new = old | part if isinstance(old, dict) else old.model_copy(update=part)
        result = result.model_copy(update={name: new})
    result = result.model_copy(update=changes)
    (folder / "result.json").write_text(result.model_dump_json())


def test_compare_says_what_differs_and_what_that_changed(line, tmp_path):
    one, other = write_run(tmp_path / "one", 1, 4), write_run(tmp_path / "other", 7, 3)
    change(one, machine={"torch": "2.12"}, samples_per_s=16.0, accuracy=0.5)
    new = {"learning_rate": 0.5, "options": {"bucket_mb": 3}, "output": "elsewhere"}
    change(other, settings=new, machine={"torch": "2.13"}, samples_per_s=21.0, accuracy=0.75)
    line("compare", one, other, "--json")
    assert (line.code, line.err) == (0, "")
    found = json.loads(line.out)
    assert found["settings"] == [
        {"name": "learning_rate", "left": None, "right": 0.5},
        {"name": "bucket_mb (of the strategy)", "left": None, "right": 3},
    ]
    assert found["machine"] == [{"name": "torch", "left": "2.12", "right": "2.13"}]
    figures = {row["name"]: (row["left"], row["right"]) for row in found["figures"]}
    assert figures["test accuracy"] == (0.5, 0.75)
    assert figures["step, untraced"] == (4, 3)
    assert figures["samples/s"] == (16, 21)
    faster = "other trains 21.0 samples/s, 1.31 times those of one (16.0 samples/s)"
    assert found["sentences"][0] == faster
    # Half of a step is forward, and half the update: 0.5 s less of each.
    assert found["sentences"][1].startswith("a traced step is 1.00 s shorter; what changed most")
    assert found["sentences"][2] == "machine or versions differ in torch"
    line("compare", one, other)
    assert line.code == 0
    for text in (
        "What came of it",
        "Settings that differ",
        "learning rate",
        "1.31 times",
        "+25.00",
    ):
        assert text in line.out


def test_compare_of_unlike_runs_warns_of_seconds(line, tmp_path):
    one, other = write_run(tmp_path / "one", 1, 4), write_run(tmp_path / "other", 7, 3)
    change(other, settings={"batch_size": 128})
    line("compare", one, other)
    assert "the runs differ in batch size: compare samples/s" in line.out
    line("compare", one, one)
    assert "neither settings nor machine differ" in line.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*PLAN, "--output", "file/inside"], "output: cannot make file/inside/"),
        ([*PLAN, "--sweep", "bandwidth=1M:2M", "--output", "plans"], "output: keeps one plan"),
        (["compare", "run", "nameless"], "nameless/result.json: cannot be read: No such file"),
        (["report", "old"], "old/result.json: ranking: Field required"),
        (["report", "old", "--rehearsal", "run"], "old/result.json: ranking: Field required"),
        (["report", "planned", "--rehearsal", "run"], "planned: no rehearsal can stand beside it"),
    ],
)
def test_what_cannot_be_done_is_one_line(line, tmp_path, arguments, message):
    write_run(tmp_path / "run", 1, 1)
    (tmp_path / "file").write_text("")
    (tmp_path / "nameless").mkdir()
    trace = (tmp_path / "run" / "trace.json").read_text()
    (tmp_path / "nameless" / "trace.json").write_text(trace)
    for name, more in (("old", {}), ("planned", {"ranking": RANKING})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trace.json").write_text(trace)
        fields = {"kind": "plan", "id": name, "model": "net", "machine": "a", "batch_size": 1}
        content = json.dumps(fields | {"facts": {}} | more)
        (tmp_path / name / "result.json").write_text(content)
    line(*arguments)
    assert (line.code, line.out) == (2, "")
    assert line.err.startswith(f"paceline: {message}")
    assert line.err.count("\n") == 1


RANKING = {
    "plans": [],
    "refused": [{"strategy": "wheel", "workers": 2, "placement": "as listed", "why": "no head"}],
    "workers_worth": None,
    "workers_sentence": None,
    "advice": None,
}


def test_a_page_without_any_plan_says_why(tmp_path):
    fields = {"kind": "plan", "id": "none", "model": "net", "machine": "a", "batch_size": 1}
    (tmp_path / "result.json").write_text(json.dumps(fields | {"facts": {}, "ranking": RANKING}))
    (tmp_path / "trace.json").write_text('{"traceEvents": []}')
    page = write_report(tmp_path).read_text()
    assert "Nothing can be planned" in page
    assert "no head" in page
    assert "plotly.js v" not in page


def test_tensorboard_has_to_be_installed(line, monkeypatch):
    # As where it is not: importlib finds no module that is None.
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    line("train", "lenet5", "--tensorboard", "board")
    assert line.code == 2
    assert line.err == (
        "paceline: tensorboard: is not installed; it is an extra: "
        "pip install 'paceline[tensorboard]'\n"
    )
    assert not Path("board").exists()
