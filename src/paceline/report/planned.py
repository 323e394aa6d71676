"""The page of a saved plan: the predictions for all strategies on a machine."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from paceline.planner import Refusal
from paceline.planner.second_machine import SecondMachine
from paceline.record.trace import read_trace
from paceline.records.result import PlanResult, PlanRow, RankingRows
from paceline.report.figures import (
    HOVER,
    Described,
    Panel,
    decades,
    escaped,
    figure_of,
    line,
    whole_numbers,
)
from paceline.report.format import counted, duration, nbytes, number, optional_share, share
from paceline.report.page import Page, readable
from paceline.report.plans import (
    bandwidth,
    label,
    of_second_machine,
    plan_tables,
    recommendation,
)
from paceline.report.steps import two_steps
from paceline.report.tables import Rows, Table, plan_name, plans_table

_POINTS: dict[str, Any] = {"mode": "lines+markers", "hovertemplate": HOVER}


def page_of(result: PlanResult, folder: Path) -> Page:
    """Build the page of a plan."""
    ranking = result.ranking
    plans, refused, needed = ranking.plans, ranking.refused, result.second_machine
    asked = {"model": result.model, "machine": result.machine, "batch_size": result.batch_size}
    asked |= {"input_shape": result.input_shape} if result.input_shape else {}
    what = f"predicted on {result.machine}, {result.batch_size} samples a step"
    content: dict[str, Any] = {
        "result": result,
        "line": f"{what}; nothing has run",
        "tiles": _tiles(ranking),
        "recommended": recommendation(result),
        "best": plan_tables(plans, ranking.alone_samples_per_s),
        "plans": plans_table(plans) if plans else None,
        "by_workers": _by_workers(plans) if len({one.workers for one in plans}) > 1 else None,
        "second_machine": needed and _second_machine(needed),
        "needed": list(of_second_machine(needed)) if needed else [],
        "refused": _refused(refused) if refused else None,
        "steps": two_steps(list(read_trace(folder / "trace.json").values())),
        "settings": {"Asked for": readable(asked), "Made with": readable(result.facts)},
    }
    return Page(f"{result.model} planned, {result.id}", "plan.html", content)


def _refused(refused: Sequence[Refusal]) -> Table:
    rows: Rows = [(row.strategy, str(row.workers), row.placement, row.why) for row in refused]
    return Table(("strategy", "workers", "devices", "why"), rows, (0, 2, 3))


def _tiles(ranking: RankingRows) -> list[tuple[str, str, str]]:
    if not ranking.plans:
        return [("plans", "none", "see what was refused, and why")]
    best = ranking.plans[0]
    where = f"{counted(best.workers, 'worker')}, {best.placement}"
    return [
        ("best plan", plan_name(best), where),
        ("predicted step", duration(best.step_s), f"±{share(best.range_share, 0)}"),
        ("samples/s", number(best.samples_per_s), "predicted"),
        ("efficiency", optional_share(best.efficiency), "of the devices' separate speeds"),
        ("memory", nbytes(best.fullest_nbytes), "of the fullest device"),
    ]


def _by_workers(plans: Sequence[PlanRow]) -> Described:
    best: dict[str, dict[int, PlanRow]] = {}
    for plan in plans:
        best.setdefault(plan.strategy, {}).setdefault(plan.workers, plan)
    lines = []
    for i, (strategy, by_workers) in enumerate(best.items()):
        numbers, points = zip(*sorted(by_workers.items()), strict=True)
        rates = [plan.samples_per_s for plan in points]
        told = [
            f"{escaped(plan_name(plan))}, {plan.workers} workers<br>{number(rate)} samples/s"
            for plan, rate in zip(points, rates, strict=True)
        ]
        lines.append(line(i, strategy, numbers, rates, customdata=told, **_POINTS))
    counts = {plan.workers for plan in plans}
    is_wide = max(counts) > 32 * min(counts)
    x = {"title": "workers"} | (decades(counts) if is_wide else whole_numbers(max(counts)))
    panel = Panel(lines, x, {"title": "samples/s", "rangemode": "tozero"})
    return figure_of([panel], 330)


def _second_machine(found: SecondMachine) -> Described:
    """Draw, for each speed of the second machine, the least bandwidth that speeds up training."""
    names = [str(Fraction(speed)) for speed in found.speeds]
    lines = []
    for i, one in enumerate(found.requirements):
        least = [None if bits is None else bits / 1e6 for bits in one.bits_per_s]
        told = ["" if bits is None else bandwidth(bits) for bits in one.bits_per_s]
        lines.append(line(i, label(one), names, least, customdata=told, **_POINTS))
    shown = [value for drawn in lines for value in drawn["y"] if value is not None]
    x: Described = {"title": "speed of the second machine", "type": "category"}
    x |= {"categoryorder": "array", "categoryarray": names}
    return figure_of([Panel(lines, x, {"title": "Mbit/s"} | decades(shown))], 330)
