"""The page of a saved plan: every way of training a model on a machine, as it was predicted."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.core.outcome import Insight
from paceline.planner import Refusal
from paceline.record.trace import read_trace
from paceline.records.result import PlanResult, PlanRow, RankingRows
from paceline.report.figures import (
    COLOURS,
    HOVER,
    Described,
    Panel,
    decades,
    escaped,
    figure_of,
    whole_numbers,
)
from paceline.report.format import counted, duration, nbytes, number, optional_share, ratio, share
from paceline.report.insights import WORTH, of_exchanges, verdict
from paceline.report.page import Page, by_topic, readable
from paceline.report.steps import two_steps
from paceline.report.tables import Rows, Table, plan_name, plans_table
from paceline.strategies import EXCHANGES, STRATEGIES

_SYMBOLS = ("circle", "square", "diamond", "cross", "x", "triangle-up", "star")
_BEST = 12


def page_of(result: PlanResult, folder: Path) -> Page:
    """Return the page of a plan."""
    ranking = result.ranking
    plans, refused = ranking.plans, ranking.refused
    asked = {"model": result.model, "machine": result.machine, "batch_size": result.batch_size}
    asked |= {"input_shape": result.input_shape} if result.input_shape else {}
    what = f"predicted on {result.machine}, {result.batch_size} samples a step"
    content: dict[str, Any] = {
        "result": result,
        "line": f"{what}; nothing has run",
        "tiles": _tiles(ranking),
        "topics": by_topic(of_plan(ranking)),
        "plans": plans_table(plans) if plans else None,
        "most": _BEST,
        "reasons": [f"{_described(plan)}: {plan.explanation}" for plan in plans],
        "by_workers": _by_workers(plans) if len({one.workers for one in plans}) > 1 else None,
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
        ("predicted step", duration(best.step_s), f"give or take {share(best.range_share, 0)}"),
        ("samples/s", number(best.samples_per_s), "predicted"),
        ("efficiency", optional_share(best.efficiency), "of what its devices reach alone"),
        ("memory", nbytes(best.fullest_nbytes), "of the fullest device"),
    ]


def _by_workers(plans: Sequence[PlanRow]) -> Described:
    best: dict[str, dict[int, PlanRow]] = {}
    for plan in plans:
        best.setdefault(plan.strategy, {}).setdefault(plan.workers, plan)
    lines: list[Described] = []
    for i, (strategy, by_workers) in enumerate(best.items()):
        points = [plan for _, plan in sorted(by_workers.items())]
        told = [
            f"{escaped(plan_name(plan))}, {plan.workers} workers<br>"
            f"{number(plan.samples_per_s)} samples/s"
            for plan in points
        ]
        line: Described = {"type": "scatter", "mode": "lines+markers", "name": escaped(strategy)}
        line |= {"x": [plan.workers for plan in points], "y": [p.samples_per_s for p in points]}
        line |= {"line": {"color": COLOURS[i % len(COLOURS)]}, "hovertemplate": HOVER}
        line |= {"marker": {"symbol": _SYMBOLS[i % len(_SYMBOLS)], "size": 8}}
        lines.append(line | {"customdata": told})
    counts = {plan.workers for plan in plans}
    is_wide = max(counts) > 32 * min(counts)
    x = {"title": "workers"} | (decades(counts) if is_wide else whole_numbers(max(counts)))
    panel = Panel(lines, x, {"title": "samples/s", "rangemode": "tozero"})
    return figure_of([panel], 330)


def of_plan(ranking: RankingRows) -> Iterator[Insight]:
    """Yield the insights about the plans, the most important first."""
    if not ranking.plans:
        sentence = "Nothing can be planned: every strategy was refused, for the reasons below."
        refused = (("refused", str(len(ranking.refused))),)
        yield Insight("method", sentence, refused, "plans.none")
        return
    best = ranking.plans[0]
    yield _method(ranking.plans)
    figures = [("exposed communication", duration(best.exposed_s))]
    sentence = f"The best plan {best.why}."
    if best.efficiency is not None:
        reached = share(best.efficiency)
        figures.append(("efficiency", reached))
        sentence = (
            f"{verdict(best.efficiency)}: it reaches {reached} of what its devices would on their "
            f"own; it {best.why}."
        )
    yield Insight("limit", sentence, tuple(figures), "limit.best_plan")
    yield _change(ranking, best)
    if ranking.workers_sentence:
        rates: dict[int, float] = {}
        for plan in ranking.plans:
            rates[plan.workers] = max(rates.get(plan.workers, 0.0), plan.samples_per_s)
        found = [(counted(n, "worker"), f"{number(r)} samples/s") for n, r in sorted(rates.items())]
        sentence = f"{_capital(ranking.workers_sentence)}."
        yield Insight("workers", sentence, tuple(found[:8]), "workers.worth")
    if best.memory_nbytes:
        name = max(best.memory_nbytes, key=best.memory_nbytes.__getitem__)
        sentence = f"The fullest, {name}, needs {nbytes(best.memory_nbytes[name])} of memory."
        held = tuple((one, nbytes(count)) for one, count in best.memory_nbytes.items())
        yield Insight("memory", sentence, held[:4], "memory.fullest")
    yield from of_exchanges(ranking.plans)


def _described(plan: PlanRow) -> str:
    codec = f" with {plan.codec}" if plan.codec else ""
    balanced = " in balanced parts" if plan.is_balanced else ""
    return f"{plan.strategy}{codec} on {counted(plan.workers, 'worker')}{balanced}"


def _method(plans: Sequence[PlanRow]) -> Insight:
    best = plans[0]
    rate = f"{number(best.samples_per_s)} samples/s"
    sentence = f"{_described(best)} is predicted to be the fastest: {rate}"
    figures, code = [(_described(best), f"{duration(best.step_s)} a step")], "plans.best"
    other = next((plan for plan in plans if plan.strategy != best.strategy), None)
    if other is not None:
        times = ratio(best.samples_per_s, other.samples_per_s)
        sentence += f", {times:.2f} times those of {_described(other)}, the best of the others"
        if (1 + best.range_share) * best.step_s >= (1 - other.range_share) * other.step_s:
            both = _is_rehearsed(best) and _is_rehearsed(other)
            advice = "rehearse both" if both else "either may be the faster"
            code = "plans.close.rehearse" if both else "plans.close"
            sentence += f"; their ranges overlap: {advice}"
        figures.append((_described(other), f"{duration(other.step_s)} a step"))
    sentence = "; ".join((sentence, *best.notes))
    return Insight("method", f"{sentence}.", tuple(figures), code)


def _change(ranking: RankingRows, best: PlanRow) -> Insight:
    step = ("step", duration(best.step_s))
    figures: list[tuple[str, str]] = [("exposed communication", duration(best.exposed_s)), step]
    left_s = best.step_s - best.exposed_s
    advice, is_exchange = ranking.advice, best.strategy in EXCHANGES
    if advice is not None and advice.pays and is_exchange:
        figures.append(("the link is busy", f"{share(advice.link_busy)} of a plain step"))
        sentence = f"{_capital(advice.sentence)}."
        return Insight("change", sentence, tuple(figures), "change.codec")
    if not is_exchange:  # the gains below are those of exchanges alone
        code, sentence = _trial(best)
    elif best.exposed_s > WORTH * best.step_s and left_s > 0:
        code = "faster_exchange"
        sentence = (
            "Change the exchange first (a faster link, larger batches): without exposed "
            f"communication a step would take {duration(left_s)} instead of "
            f"{duration(best.step_s)}, at best {best.step_s / left_s:.2f} times as fast"
        )
    else:
        times = best.step_s / left_s if left_s > 0 else float("inf")
        code = "exchange_hidden"
        sentence = (
            f"The exchange hides, or costs nothing: without what shows of it a step would be at "
            f"best {times:.2f} times as fast"
        )
    if advice is not None:
        sentence += f". As to codecs, {advice.sentence}"
    return Insight("change", f"{sentence}.", tuple(figures), f"change.{code}")


def _trial(plan: PlanRow) -> tuple[str, str]:
    """Return the code and the sentence of how a plan can be tried, if it can be."""
    strategy, described = STRATEGIES.get(plan.strategy), _described(plan)
    if strategy is not None and strategy.running is None:
        return "cannot_run", f"{described} can be planned, but not run here"
    first = f"{described} before anything is changed for it"
    if _is_rehearsed(plan):
        return "rehearse", f"Rehearse {first}"
    return "train_shortly", f"Train for a short time with {first}"


def _is_rehearsed(plan: PlanRow) -> bool:
    """Return True if it is known that the plan's strategy can be rehearsed."""
    strategy = STRATEGIES.get(plan.strategy)
    return strategy is not None and strategy.is_rehearsed


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
