"""Report page of a run: structure, figures, tables and tiles."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from command_line import steps
from command_line import write_run as run_folder
from findings import numbers, run_result
from paceline.core.compare import compare
from paceline.core.outcome import Epoch, Finding, Traffic, Updates
from paceline.core.settings import TrainSettings
from paceline.core.timeline import Timeline
from paceline.record.trace import write_trace
from paceline.records.result import RunResult, read_run
from paceline.report import write_report
from paceline.report.figures import PARTS
from paceline.report.format import duration, share
from plan_rows import plan_row

TIMELINES = steps(1, "predicted"), steps(2, "measured")
VOID = {"meta", "br", "img", "link", "input", "hr"}


def result() -> RunResult:
    tree = {"strategy": "tree", "why": "exchanges <everything>", "wire_nbytes_per_step": 2**21}
    return run_result(
        id="20260102-030405-test-0a1b",
        settings=TrainSettings(model="test", epochs=2, options={"bucket_mb": 1}),
        machine={"processor": "Some & Processor", "memory_bytes": 2**30, "sets": ["avx2", "fma"]},
        plans=(
            plan_row(step_s=0.0123, samples_per_s=5203.2, wire_nbytes_per_step=3 * 2**19),
            plan_row(step_s=0.0246, samples_per_s=2601.6, **tree),
        ),
        epochs=(
            Epoch(number=0, train_loss=1.5, test_loss=1.25, score=0.5, seconds=4),
            Epoch(number=1, train_loss=0.75, test_loss=0.8125, score=0.9625, seconds=3.5),
        ),
        accuracy=0.9625,
        predicted_step_s=0.0123,
        step_s=0.015,
        samples_per_s=4266.7,
        comparison=compare(*TIMELINES),
        peak_memory_bytes=(300 * 2**20, 301 * 2**20),
    )


def write_run(folder: Path, content: RunResult, *recorded: Timeline) -> str:
    (folder / "result.json").write_text(content.model_dump_json())
    write_trace(folder / "trace.json", recorded)
    path = write_report(folder)
    assert path == folder / "report.html"
    return path.read_text()


class Page(HTMLParser):
    """Parses a page into tags, texts and table rows; asserts that all tags are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" in self.open:
            return
        self.texts.append(data)
        if {"th", "td"} & set(self.open):
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def test_a_page_is_well_formed_self_contained_and_small(tmp_path: Path) -> None:
    html = write_run(tmp_path, result(), *TIMELINES)
    page = Page(html)
    for tag, attributes in page.tags:
        assert not {"src", "href", "srcset", "action", "data"} & attributes.keys(), tag
    assert not {"link", "iframe", "object", "img"} & {tag for tag, _ in page.tags}
    assert not any(one in page.text for one in ("@import", "url("))
    assert html.count("plotly.js (basic - minified) v") == 1
    assert len(html.encode()) < 1.5e6
    for value in (
        *("96.25 %", "12.3 ms", "15.0 ms", "-18.0 %", "4,267"),
        *("20260102-030405-test-0a1b", "2026-01-02 03:04:05"),
        *("bucket_mb = 1", "Some & Processor", "1.00 GiB", "avx2, fma", "30.0 s"),
    ):
        assert value in page.text
    why = "computes 90 % of the step"
    assert ["allreducethis run", "2", "12.3 ms ±13 %", "5,203", "1.50 MiB", why] in page.rows
    cells = "24.6 ms ±13 %", "2,602", "2.00 MiB", "exchanges <everything>"
    assert ["tree", "2", *cells] in page.rows
    assert ["2", "0.7500", "0.8125", "96.25 %", "3.50 s"] in page.rows
    assert any(row[1:3] == ["predicted", "measured"] for row in page.rows)
    for row in result().comparison.rows:
        label = PARTS[row.quantity].label if row.quantity in PARTS else row.quantity
        error = "-" if row.error is None else share(row.error, signed=True)
        assert [label, duration(row.left_s), duration(row.right_s), error] in page.rows


def test_a_page_lists_20_faults_and_counts_the_rest(tmp_path: Path) -> None:
    faults = tuple(f"fault {i} <here>" for i in range(25))
    text = Page(write_run(tmp_path, result().model_copy(update={"faults": faults}))).text
    assert ("fault 19 <here>" in text, "fault 20" in text) == (True, False)
    counts = numbers(text[text.index("Conformity") :])
    assert (counts[0], 5 in counts) == (25, True)
    faultless = write_run(tmp_path, result().model_copy(update={"faults": ()}))
    assert "<h2>Conformity" in faultless
    assert 'class="faults"' not in faultless


def test_a_page_of_asynchronous_workers_shows_updates_and_traffic(tmp_path: Path) -> None:
    updates = Updates(4, {"w0": 3, "w1": 1}, {"w0": {0: 3}, "w1": {2: 1}}, 0.5, ((0.5, 1), (1, 2)))
    content = run_result(
        id="shared",
        settings=TrainSettings(model="test", strategy="wheel"),
        strategy="wheel",
        config={"lanes": 2, "head": "fc6"},
        epochs=(Epoch(0, 1.5, 1.25, 0.5, 4.0),),
        traffic=(Traffic("activations", 4096, 8192), Traffic("loss", 8, 8, travels=False)),
        wire_nbytes=(2**20, 2**21),
        updates=updates,
        utilisation={"cpu0": 0.75},
        predicted_utilisation={"cpu0": 0.8},
        lost=("worker 1 was ended",),
    )
    html = write_run(tmp_path, content)
    page = Page(html)
    for value in ("lanes 2", "head fc6", "1.2500", "1.00 MiB", "2.00 MiB", "0.50", *content.lost):
        assert value in page.text
    # Planned bytes, measured bytes, and measured bytes per update.
    (row,) = [one for one in page.rows if one[0] == "activations"]
    assert row[2:] == ["8.00 KiB", "4.00 KiB", "1.00 KiB"]
    # Asynchronous workers have no common step.
    assert "Where a step goes" not in page.text
    assert not any(label.startswith("predicted") for label in tiles(html))


def tiles(html: str) -> dict[str, tuple[str, str]]:
    """Return the value and note of each tile by label."""
    found = re.findall(r'<div class="tile"><span>(.*?)</span><b>(.*?)</b><small>(.*?)</sm', html)
    return {label: (value, note) for label, value, note in found}


def page_of(folder: Path, **changes: object) -> str:
    """Change fields of a run's result; return the run's page."""
    found = read_run(folder).model_copy(update=changes)
    (folder / "result.json").write_text(found.model_dump_json())
    return write_report(folder).read_text()


@pytest.mark.parametrize(
    ("step_s", "lies", "origin"),
    [
        *((0.86, "outside", "measured"), (0.88, "within", "measured")),
        *((1.12, "within", "rehearsed"), (1.14, "outside", "rehearsed")),
    ],
)
def test_the_median_is_within_the_range_or_outside(tmp_path, step_s, lies, origin) -> None:
    found = tiles(page_of(run_folder(tmp_path / "run", 1.0, step_s), origin=origin))
    value, note = found["predicted step"]
    assert (value, numbers(note)) == ("1.00 s", [9, 10, 870, 1.13])  # 13 % around 1 s
    assert f"{origin} step" in found
    assert f" {lies} " in found["prediction error"][1]


def test_a_prediction_without_a_range_has_no_verdict(tmp_path) -> None:
    """For example after a search for the chunk size, whose prediction is in no plan."""
    found = tiles(page_of(run_folder(tmp_path / "run", 1.0, 2.0), predicted_step_s=1.5))
    (step, note), (error, lies) = found["predicted step"], found["prediction error"]
    assert (step, error, numbers(note + lies), "within" in lies) == ("1.50 s", "-25.0 %", [], False)


def test_a_page_shows_the_most_valuable_findings(tmp_path) -> None:
    found = [Finding(code=c, metric="m", value=1, threshold=0, message=f"<{c}>") for c in "abcd"]
    text = page_of(run_folder(tmp_path / "run", 1.0, 1.0), findings=tuple(found))
    shown = [f"&lt;{code}&gt;" in text for code in "abcd"]
    assert shown == [True, True, True, False]


@pytest.mark.parametrize(
    ("score", "other"), [("accuracy", "bits per byte"), ("bits per byte", "accuracy")]
)
def test_reports_name_the_score(tmp_path: Path, score: str, other: str) -> None:
    settings = TrainSettings(model="mlp", strategy="hogbatch")
    uneven = run_result(settings=settings, strategy="hogbatch", score=score, trained_s=3.0)
    for page in (
        page_of(run_folder(tmp_path / "run", 1.0, 1.0), score=score),
        write_run(tmp_path, uneven, Timeline([], "measured")),
    ):
        assert page.lower().count(f"test {score}") >= 2
        assert f"test {other}" not in page.lower()
