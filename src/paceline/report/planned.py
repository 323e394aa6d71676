"""The sections of a saved plan: every way of training a model on a machine, as it was predicted."""

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import plotly.graph_objects as go

from paceline.plan_result import PlanResult, read_plan
from paceline.record.trace import read_trace
from paceline.report.figures import styled
from paceline.report.format import duration, nbytes, number, share
from paceline.report.header import Drawn, Tile, header
from paceline.report.insights import insights
from paceline.report.markup import Html, element, fact_table, table
from paceline.report.sections import figure_of, readable, section, steps
from paceline.report.worth import of_plan
from paceline.result import PlanRow, RankingRows

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255")
_SYMBOLS = ("circle", "square", "diamond", "cross", "x", "triangle-up", "star")
_BEST = 12
_HEIGHT, _LEFT = 330, 60  # pixels
_HEAD = (
    *("strategy", "workers", "devices", "step", "samples/s", "efficiency", "exposed", "wire/step"),
    *("memory", "why"),
)


def drawn(folder: Path) -> Drawn | None:
    """Return the page of the folder of a plan; None if it is of another kind."""
    result = read_plan(folder)
    if result is None:
        return None
    timelines = list(read_trace(folder / "trace.json").values())
    body = [_header(result), insights(of_plan(result.ranking)), *_sections(result)]
    if timelines:
        body.append(steps(timelines))
    return f"{result.model} planned, {result.id}", [*body, _facts(result)]


def _header(result: PlanResult) -> Html:
    line = f"predicted on {result.machine}, {result.batch_size} samples a step; nothing has run"
    return header(result.model, line, result.id, _tiles(result.ranking))


def _tiles(ranking: RankingRows) -> tuple[Tile, ...]:
    if not ranking.plans:
        return (("plans", "none", "see what was refused, and why"),)
    best = ranking.plans[0]
    reached = "-" if best.efficiency is None else share(best.efficiency)
    plural = "s" * (best.workers > 1)
    return (
        ("best plan", _named(best), f"{best.workers} worker{plural}, {best.placement}"),
        ("predicted step", duration(best.step_s), f"give or take {share(ranking.error_bar, 0)}"),
        ("samples/s", number(best.samples_per_s), "predicted"),
        ("efficiency", reached, "of what its devices reach alone"),
        ("memory", nbytes(_fullest(best)), "of the fullest device"),
    )


def _named(plan: PlanRow) -> str:
    return f"{plan.strategy} + {plan.codec}" if plan.codec else plan.strategy


def _fullest(plan: PlanRow) -> int:
    return max(plan.memory_nbytes.values(), default=0)


def _sections(result: PlanResult) -> Iterator[Html]:
    ranking = result.ranking
    if ranking.plans:
        yield _plans(ranking.plans)
    if len({plan.workers for plan in ranking.plans}) > 1:
        yield _by_workers(ranking.plans)
    if ranking.refused:
        rows = [(row.strategy, str(row.workers), row.placement, row.why) for row in ranking.refused]
        head = ("strategy", "workers", "devices", "why")
        drawn = table(head, rows, text_columns=(0, 2, 3))
        yield section("Refused", "What cannot be used, and why.", drawn)


def _plans(plans: Sequence[PlanRow]) -> Html:
    note = (
        "Best first. Exposed: communication during which a device computes nothing. Wire: bytes of "
        "a step on the busiest link, in one direction. Memory: that of the fullest device."
    )
    text = (0, 2, len(_HEAD) - 1)
    first = element("div", table(_HEAD, map(_row, plans[:_BEST]), text), class_="wide plan")
    if len(plans) <= _BEST:
        return section("Plans", note, first)
    every = element("div", table(_HEAD, map(_row, plans), text), class_="wide plan")
    return section(
        "Plans", note, first, element("details", element("summary", f"All {len(plans)}"), every)
    )


def _row(plan: PlanRow) -> tuple[str, ...]:
    return (
        _named(plan),
        str(plan.workers),
        plan.placement,
        duration(plan.step_s),
        number(plan.samples_per_s),
        "-" if plan.efficiency is None else share(plan.efficiency),
        duration(plan.exposed_s),
        nbytes(plan.wire_nbytes_per_step),
        nbytes(_fullest(plan)),
        plan.why,
    )


def _by_workers(plans: Sequence[PlanRow]) -> Html:
    """Return what each strategy reaches, with its best plan, on so many workers."""
    best: dict[str, dict[int, PlanRow]] = {}
    for plan in plans:
        best.setdefault(plan.strategy, {}).setdefault(plan.workers, plan)
    figure = go.Figure()
    for i, (strategy, by_workers) in enumerate(best.items()):
        points = sorted(by_workers.items())
        figure.add_trace(
            go.Scatter(
                x=[workers for workers, _ in points],
                y=[plan.samples_per_s for _, plan in points],
                name=escape(strategy, quote=False),
                mode="lines+markers",
                line={"color": _COLOURS[i % len(_COLOURS)]},
                marker={"symbol": _SYMBOLS[i % len(_SYMBOLS)], "size": 8},
                customdata=[
                    f"{escape(_named(plan), quote=False)}, {workers} workers<br>"
                    f"{number(plan.samples_per_s)} samples/s"
                    for workers, plan in points
                ],
                hovertemplate="%{customdata}<extra></extra>",
            )
        )
    counts = {plan.workers for plan in plans}
    kind = "log" if max(counts) > 32 * min(counts) else "linear"
    figure.update_xaxes(title_text="workers", type=kind, tickformat="d")
    if len(counts) <= 10:
        figure.update_xaxes(tickvals=sorted(counts))
    figure.update_yaxes(title_text="samples/s", rangemode="tozero")
    note = "Each strategy at its best on so many workers: codec, chunk and choice of devices."
    drawn = figure_of(styled(figure, _HEIGHT, _LEFT), "workers")
    return section("How far it scales", note, drawn)


def _facts(result: PlanResult) -> Html:
    asked = {"model": result.model, "machine": result.machine, "batch_size": result.batch_size}
    asked |= {"input_shape": result.input_shape} if result.input_shape else {}
    columns = (
        element("div", element("h3", "Asked for"), fact_table(readable(asked))),
        element("div", element("h3", "Made with"), fact_table(readable(result.facts))),
    )
    return section("Settings", "", element("div", *columns, class_="pair"))
