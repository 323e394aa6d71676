"""Define the fuzzed parsers of machine files, settings, results, traces and journals."""

import os
from dataclasses import asdict
from functools import cache
from io import StringIO
from pathlib import Path

from rich.console import Console

from command_line import steps, write_run
from findings import run_result
from fuzzing.changes import JSON, NODES, TOML, VALUES
from fuzzing.parser import Parser, on_file
from paceline.commands.options import fields_of
from paceline.core import outcome as parts
from paceline.core.compare import compare
from paceline.core.errors import InvalidInput
from paceline.core.settings import RehearseSettings, TrainSettings
from paceline.core.timeline import Origin
from paceline.record.trace import read_timeline, read_trace, write_trace
from paceline.records.config_file import read_config, to_toml, write_config
from paceline.records.machine_file import machine_text, read_machine
from paceline.records.result import PlanResult, RankingRows, RunResult, read_result, read_run
from paceline.records.scale import ScaleResult, ScaleSettings
from paceline.records.settings import validated_settings
from paceline.report import write_report
from paceline.report.comparison import difference_tables, differences
from paceline.report.tables import comparison_table
from paceline.report.terminal import shown
from paceline.studies.scale.journal import Journal, JournalHeader
from plan_rows import plan_row
from profiles import LARGEST, profile_result, write_profile
from scale_cells import cell, failed, study

_MACHINES = Path(__file__).parents[3] / "machines"
_STUDY = JournalHeader(id="study", paceline="0", settings=ScaleSettings(model="lenet5"))


def _runs() -> list[RunResult]:
    """Return an asynchronous run with every field that a result can have, and a rehearsal."""
    names = ("cpu0", "cpu1")
    with_all = run_result(
        settings=TrainSettings(model="mlp", strategy="hogbatch", workers="cpu:1,cpu:2@slow=16"),
        strategy="hogbatch",
        machine={"processor": "some", "cores": 2, "memory_bytes": 2**34},
        config={"policy": "adaptive"},
        plans=(plan_row(workers=1, notes=("a note",)),),
        trials=(parts.ChunkTrial(3, 0.01, 0.011), parts.ChunkTrial(5, 0.012, 0.013)),
        epochs=tuple(parts.Epoch(i, 2.0 / (i + 1), 1.9, 0.5, 3.0) for i in range(3)),
        evaluations=(parts.Evaluation(10, 1.5, 0.4), parts.Evaluation(20, 1.2, None)),
        trained_s=9.0,
        tokens_per_s=5.0,
        predicted_step_s=0.01,
        step_s=0.011,
        lower_quartile_s=0.01,
        upper_quartile_s=0.012,
        faults=("s0/step@worker0 is missing",),
        decisions=("because",),
        lost=("worker 1 was ended by SIGKILL",),
        peak_memory_bytes=(2**28, 2**28),
        traffic=(parts.Traffic("gradients", 1e6, 1e6), parts.Traffic("labels", 2e6, 2e6, False)),
        wire_nbytes=(3000, 4000),
        sent_share=parts.SentShare("threshold:0.1", 0.1, 0.11, None),
        head=parts.SplitHead(("out",), 4000, (2000, 2000)),
        updates=parts.Updates(
            100,
            dict.fromkeys(names, 50),
            {name: {0: 10, 1: 30, 40: 10} for name in names},
            1.5,
            ((0.5, 1), (1.0, 3)),
        ),
        workers=tuple(
            parts.UnevenWorker(name, "cpu:1", 500.0, 3000, 0.5, 0.5, ((0.1, 64), (0.2, 128)))
            for name in names
        ),
        utilisation=dict.fromkeys(names, 0.9),
        predicted_utilisation=dict.fromkeys(names, 0.8),
    )
    settings = RehearseSettings(model="lenet5", workers=1, slowdown=(4.0,), strategy="host")
    compared = compare(steps(0.011, "predicted"), steps(0.01, "rehearsed"))
    rehearsal = run_result(
        origin="rehearsed",
        settings=settings,
        epochs=(),
        accuracy=None,
        step_s=0.01,
        comparison=compared,
    )
    return [with_all, rehearsal]


def _plan() -> PlanResult:
    plans = tuple(plan_row(workers=count, samples_per_s=count) for count in (1, 2, 4))
    rows = RankingRows(
        plans=plans, refused=(), workers_worth=2, alone_samples_per_s=1.0, advice=None
    )
    facts = {"paceline": "0"}
    return PlanResult(
        id="plan", model="lenet5", machine="two", batch_size=64, facts=facts, ranking=rows
    )


def _scale() -> ScaleResult:
    cells = (*study({"allreduce": 1.0, "tree": 2.0}, (1, 2, 4), (16, 32)), cell(), failed())
    one = parts.Finding(code="exchange", metric="exposed", value=1, threshold=0.1, message="Wait.")
    settings = ScaleSettings(model="lenet5", workers=(1, 2, 4), batch_size=(16, 32))
    return ScaleResult(
        id="scale", paceline="0", settings=settings, machine={}, cells=cells, findings=(one,)
    )


def _results(folder: Path) -> list[bytes]:
    write_run(folder / "run", 0.01, 0.011)
    write_profile(folder / "profile", profile_result(largest=LARGEST))
    written = [(folder / name / "result.json").read_bytes() for name in ("run", "profile")]
    made = *_runs(), _plan(), _scale()
    return written + [one.model_dump_json().encode() for one in made]


def _traces(folder: Path) -> list[bytes]:
    path = folder / "trace.json"
    write_trace(path, [steps(0.01, origin) for origin in Origin])
    return [path.read_bytes()]


def _beside_a_valid_file(data: bytes, folder: Path) -> Path:
    """Write a changed result or trace, with a valid trace or result; return the run's folder."""
    is_trace = b'"traceEvents"' in data or b'"displayTimeUnit"' in data
    result, trace = _fixed(folder.with_name("fixed"))
    (folder / "result.json").write_bytes(result if is_trace else data)
    (folder / "trace.json").write_bytes(data if is_trace else trace)
    return folder


def _report(data: bytes, folder: Path) -> object:
    """Write the report of a run."""
    page = write_report(_beside_a_valid_file(data, folder)).read_text(encoding="utf-8")
    if "<script>alert" in page:
        raise AssertionError("text of the file became markup in the page")
    return page


def _compare(data: bytes, folder: Path) -> object:
    """Compare a run with a valid timeline."""
    run_folder = _beside_a_valid_file(data, folder)
    left = read_timeline(run_folder / "trace.json", Origin.MEASURED)
    try:
        table = compare(left, steps(0.02, "measured"))
    except ValueError as error:
        raise InvalidInput.of(str(error)) from None
    run = read_run(run_folder)
    changed = differences(run, run, table)
    out = StringIO()
    console = Console(file=out, markup=False, emoji=False, highlight=False)
    console.print(shown("", comparison_table(table, two_runs=True)))
    for one in difference_tables(changed, table):
        console.print(one)
    if "\x1b" in out.getvalue():
        raise AssertionError("an escape code in the file reached the terminal")
    return asdict(table)


@cache
def _fixed(folder: Path) -> tuple[bytes, bytes]:
    """Return the result and the trace of a valid run."""
    folder.mkdir()
    return _results(folder)[0], _traces(folder)[0]


def _machine_seeds(folder: Path) -> list[bytes]:
    files = [*sorted(_MACHINES.glob("*.toml")), *sorted((_MACHINES / "equal").glob("*.toml"))]
    texts = [file.read_bytes() for file in files if file.stat().st_size < 20_000]
    return [*texts, machine_text(read_machine(files[0])).encode()]


def _machine(path: Path) -> object:
    found = read_machine(path)
    return machine_text(found), found.num_devices


def _config_seeds(folder: Path) -> list[bytes]:
    settings = TrainSettings(
        model="lenet5", strategy="host", workers=2, options={"chunk": 3}, optimizer="adam"
    )
    write_config(folder, settings)
    table = {"model": "mlp", "strategy": "hogbatch", "workers": "cpu:1,cpu:1", "learning_rate": 0.1}
    return [(folder / "run.toml").read_bytes(), to_toml(table).encode()]


def _journal_seeds(folder: Path) -> list[bytes]:
    with Journal(folder / "journal", _STUDY) as journal:
        journal.append(study({"allreduce": 1.0}, (1, 2)))
    return [(folder / "journal" / name).read_bytes() for name in ("cells.jsonl", "study.json")]


def _journal(data: bytes, folder: Path) -> object:
    header = folder / "study.json"
    header.unlink(missing_ok=True)
    (folder / "cells.jsonl").write_bytes(b"")
    is_header = data[:1] == b"{" and b'"settings"' in data[:4000]
    (header if is_header else folder / "cells.jsonl").write_bytes(data)
    with Journal(folder, _STUDY) as journal:
        return journal.header, tuple(journal.cells)


_OPTIONS = [b"chunk=3", b'lanes=["a", "b"]', b"rate=0.5", b"policy=adaptive", b'x={"a": [1, 2.5]}']
PARSERS = (
    Parser("machine", 3, _machine_seeds, TOML, on_file("machine.toml", _machine)),
    Parser(
        *("configuration", 2, _config_seeds, TOML),
        on_file("run.toml", lambda path: validated_settings(read_config(path, TrainSettings))),
    ),
    Parser(
        *("option", 1, lambda _: _OPTIONS, VALUES),
        lambda data, _: fields_of([os.fsdecode(data)], "--strategy-option"),
    ),
    Parser(
        "result", 3, _results, JSON, on_file("result.json", lambda one: read_result(one.parent))
    ),
    Parser("trace", 3, _traces, JSON, on_file("trace.json", read_trace)),
    Parser("report", 0.5, lambda one: [*_results(one), *_traces(one)], NODES, _report),
    Parser("compare", 1, lambda one: [_results(one)[0], *_traces(one)], NODES, _compare),
    Parser("journal", 2, _journal_seeds, JSON, _journal),
)
