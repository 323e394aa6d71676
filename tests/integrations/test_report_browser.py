"""The report of a long run in Chromium: layout, messages, requests, tables and figures."""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import CHROMIUM, Browser, Page
from findings import epoch, run_result
from paceline.core.compare import compare
from paceline.core.cost import Roofline
from paceline.core.settings import TrainSettings
from paceline.core.simulate import simulate
from paceline.core.strategy import Window
from paceline.core.timeline import Timeline
from paceline.planner import forecast, rank
from paceline.record.trace import write_trace
from paceline.records.built_in import recorded
from paceline.records.machine_file import find_machine
from paceline.records.result import PlanRow, read_run
from paceline.report import advice, metrics, write_report
from paceline.strategies import EXCHANGES
from processes import awaited

STEPS, WORKERS, BATCH = 1000, 4, 256
SCREENS = {390: 844, 820: 1180, 1440: 900}  # phone, tablet, desktop

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium or playwright is not installed"),
]


def write_long_run(folder: Path) -> None:
    """Write result.json and trace.json of a simulated run whose steps took 8 % longer."""
    part = recorded("lenet5", BATCH // WORKERS)
    machine = find_machine("power8-p100").for_workers(WORKERS)
    forecasts = rank(
        forecast(part, machine, strategy, strategy.config(workers=WORKERS), BATCH)
        for strategy in EXCHANGES.values()
    )
    chosen = next(one for one in forecasts if one.strategy == "allreduce")
    plan = EXCHANGES["allreduce"].planning.plan(part, machine, chosen.config, Window(STEPS))
    spans = simulate(plan, Roofline.of(machine)).spans
    measured = Timeline(
        [one._replace(start_s=1.08 * one.start_s, end_s=1.08 * one.end_s) for one in spans],
        "measured",
    )
    write_trace(folder / "trace.json", (chosen.timeline, measured))
    result = run_result(
        settings=TrainSettings(model="made-up", workers=WORKERS, batch_size=BATCH, epochs=20),
        plans=tuple(map(PlanRow.of, forecasts)),
        epochs=tuple(epoch(number, 2 / (number + 1)) for number in range(20)),
        predicted_step_s=chosen.step_s,
        step_s=measured.typical_step_s(),
        samples_per_s=BATCH / measured.typical_step_s(),
        comparison=compare(chosen.timeline, measured),
        peak_memory_bytes=(2**29,) * WORKERS,
    )
    found = advice.findings(metrics.of_run(result, measured))
    result = result.model_copy(update={"findings": found})
    (folder / "result.json").write_text(result.model_dump_json())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long-run")
    write_long_run(folder)
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def desk(browser: Browser, folder: Path) -> Page:
    page = browser.page(1440, SCREENS[1440])
    page.open(folder / "report.html")
    return page


def test_the_page_of_a_long_run_is_small(folder: Path) -> None:
    assert (folder / "report.html").stat().st_size < 2e6


@pytest.mark.parametrize("width", SCREENS)
def test_the_page_fits_every_screen(browser: Browser, folder: Path, width: int) -> None:
    page = browser.page(width, SCREENS[width])
    page.open(folder / "report.html")
    for dark, paper in ((False, "rgb(255, 255, 255)"), (True, "rgb(23, 25, 28)")):
        page.shown.emulate_media(color_scheme="dark" if dark else "light")
        assert page.shown.screenshot(full_page=True).startswith(b"\x89PNG")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == paper
    assert page.complaints == []
    own = (folder / "report.html").as_uri()
    assert [one for one in page.addresses if one != own and not one.startswith("data:")] == []
    assert page.evaluate("document.querySelectorAll('.js-plotly-plot').length") == 4
    # Nothing is wider than the screen, and the first screen shows two of the run's findings.
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ends = page.evaluate(
        "[...document.querySelectorAll('.says li')].map(one => one.getBoundingClientRect().bottom)"
    )
    assert 2 <= len(ends) <= 3
    assert ends[1] < SCREENS[width]
    page.close()


def pasted(page: Page) -> str:
    """Paste the clipboard into an empty field; return its text."""
    page.evaluate(
        "(globalThis.field = document.body.appendChild(document.createElement('textarea'))).focus()"
    )
    page.shown.keyboard.press("Control+V")
    text: str = page.evaluate("field.value")
    page.evaluate("field.remove()")
    return text


def test_a_table_is_copied_with_exact_numbers(desk: Page, folder: Path) -> None:
    result = read_run(folder)
    tables = desk.evaluate("document.querySelectorAll('table').length")
    assert desk.evaluate("document.querySelectorAll('button.copy').length") == tables
    button = ".plan + .copy, .plan .copy"
    text = f"document.querySelector({json.dumps(button)}).textContent"
    before = desk.evaluate(text)
    desk.shown.locator(button).first.click()
    awaited(lambda: desk.evaluate(text) != before)  # the page writes the clipboard asynchronously
    rows = list(csv.reader(io.StringIO(pasted(desk))))
    assert [head.partition(" [")[2] for head in rows[0]] == ["", "", "s]", "", "bytes]", ""]
    copied = {row[0].removesuffix(" this run"): row for row in rows[1:]}
    for plan in result.plans:
        row = copied[plan.strategy]
        exact = plan.step_s, plan.samples_per_s, plan.wire_nbytes_per_step
        assert [float(cell) for cell in row[2:5]] == pytest.approx(exact, rel=1e-11)
        assert row[5] == plan.why


def test_dragging_zooms_the_timeline(desk: Page) -> None:
    shown = "document.getElementById('figure-steps')._fullLayout.xaxis.range"
    before = desk.evaluate(shown)
    area = desk.shown.locator("#figure-steps .nsewdrag").first
    area.scroll_into_view_if_needed()
    at, mouse = area.bounding_box(), desk.shown.mouse
    middle = at["y"] + at["height"] / 2
    mouse.move(at["x"] + 0.25 * at["width"], middle)
    mouse.down()
    mouse.move(at["x"] + 0.5 * at["width"], middle, steps=4)
    mouse.up()
    awaited(lambda: desk.evaluate(shown) != before)
    start, end = desk.evaluate(shown)
    assert end - start == pytest.approx((before[1] - before[0]) / 4, rel=0.02)
    assert desk.evaluate(shown.replace("xaxis", "xaxis2")) == pytest.approx([start, end])


def test_figures_are_drawn_before_scrolling_to_them_or_printing(browser, folder):
    drawn = "[...document.querySelectorAll('.js-plotly-plot')].map(one => one.id)"
    page = browser.page(390, SCREENS[390] // 4)  # the figures are below the first screen
    # Without idle time, the page draws only figures close to the window.
    never = "globalThis.requestIdleCallback = () => {}"
    page.shown.add_init_script(never)
    page.load(folder / "report.html")
    page.evaluate("firstScreen")
    height = page.evaluate("document.body.scrollHeight")
    assert (page.evaluate("typeof Plotly"), page.evaluate(drawn)) == ("undefined", [])
    page.shown.locator("#figure-steps").scroll_into_view_if_needed()
    awaited(lambda: "figure-steps" in page.evaluate(drawn))
    assert "figure-learning" not in page.evaluate(drawn)
    # Figures that are drawn after this event are missing in print.
    ticks = "[...document.querySelectorAll('figure')].map(f => f.querySelectorAll('.xtick').length)"
    page.evaluate(f"addEventListener('beforeprint', () => {{ globalThis.printed = {ticks}; }})")
    page.shown.pdf()
    assert all(page.evaluate("printed"))
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = false; })")
    assert (page.evaluate("document.body.scrollHeight"), page.complaints) == (height, [])
    page.close()


def test_printing_shows_all_details_and_no_buttons(browser: Browser, folder: Path) -> None:
    page = browser.page(1440, SCREENS[1440], dark=True)
    page.open(folder / "report.html")
    assert page.evaluate("document.querySelector('details').open") is False
    assert page.shown.pdf().startswith(b"%PDF")
    assert page.evaluate("document.querySelector('details').open") is True
    page.shown.emulate_media(media="print", color_scheme="dark")
    hidden = "[...document.querySelectorAll('.copy')].every(one => !one.checkVisibility())"
    assert page.evaluate(hidden) is True
    paper = page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--paper')")
    assert paper.strip() == "#ffffff"
    assert page.complaints == []
    page.close()
