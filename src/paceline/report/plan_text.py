"""A plan in a terminal: two tables, a recommendation and remarks, and what explains them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.core.steps_to_loss import StepsToLoss
from paceline.core.timeline import Origin
from paceline.planner import Refusal
from paceline.planner.backward import after_backward_sentence
from paceline.records.result import PlanResult, PlanRow, RankingRows
from paceline.report import advice
from paceline.report.format import counted, duration, nbytes, number, ratio, share
from paceline.report.metrics import named
from paceline.report.tables import plan_name
from paceline.strategies import STRATEGIES

_MOST_ALIKE, _MOST_OTHERS, _MOST_REMARKS = 5, 3, 2
_FOUND_BY_TRAINING = {"workers", "chunk"}  # fields of a configuration that no option need name
_RANGE = "±: the median of the measured steps is meant to be within it in 9 of 10 cases"


def show_plan(out: Console, result: PlanResult, title: str) -> None:
    """Print a plan: its tables, which way of training to take, and at most two remarks."""
    ranking = result.ranking
    for table in plan_tables(ranking.plans, title, ranking.alone_samples_per_s):
        out.print(table)
    if (best := ranking.recommended) is not None:
        text = _recommendation(best, result, ranking.alone_samples_per_s)
        out.print(text, soft_wrap=True)
    for message in list(advice.shown(result.findings))[:_MOST_REMARKS]:
        out.print(message, soft_wrap=True)


def plan_tables(
    plans: Sequence[PlanRow], title: str, alone_samples_per_s: float | None
) -> Iterator[Table]:
    """Yield the best plans that are the same training, and those that change what is learned.

    Each strategy has its fastest with a codec and without. `alone_samples_per_s` are those of the
    best one worker, which the first table compares with.
    """
    alike = list(_fastest(plan for plan in plans if plan.is_same_training))[:_MOST_ALIKE]
    others = list(_fastest(plan for plan in plans if not plan.is_same_training))[:_MOST_OTHERS]
    if alike:
        same = f"{title}: same training"
        yield _table(same, alike, "x one", _beside(alone_samples_per_s))
    if others:
        changed = "Changes what is learned" if alike else f"{title}: changes what is learned"
        yield _table(changed, others, "to a loss", _learned)


def _fastest(plans: Iterable[PlanRow]) -> Iterator[PlanRow]:
    """Yield the first of each strategy with a codec and without, and the first of one worker."""
    seen: set[object] = set()
    for plan in plans:
        key = "one worker" if plan.workers == 1 else (plan.strategy, plan.codec is None)
        if key not in seen:
            seen.add(key)
            yield plan


def _table(
    title: str, plans: Sequence[PlanRow], last: str, shown: Callable[[PlanRow], str]
) -> Table:
    grid = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    grid.add_column("strategy")
    for head in ("workers", "step", "samples/s", "exposed", "wire/step", last):
        grid.add_column(head, justify="right", no_wrap=True)
    for plan in plans:
        placement = "" if plan.placement == "as listed" else f" ({plan.placement})"
        grid.add_row(
            plan_name(plan) + placement,
            str(plan.workers),
            f"{duration(plan.step_s)} ±{share(plan.range_share, 0)}",
            number(plan.samples_per_s),
            share(ratio(plan.exposed_s, plan.step_s), 0),
            nbytes(plan.wire_nbytes_per_step),
            shown(plan),
        )
    return grid


def _beside(alone_samples_per_s: float | None) -> Callable[[PlanRow], str]:
    def shown(plan: PlanRow) -> str:
        one = alone_samples_per_s
        return "" if one is None else number(plan.samples_per_s / one)

    return shown


def _learned(plan: PlanRow) -> str:
    """Return the steps to synchronous training's loss, as times its own, in few words."""
    steps: StepsToLoss | None = plan.steps_to_loss
    if steps is None:
        return "unknown"
    if steps.low == steps.high:
        return f"{steps.median:.2f} x"
    return f"{steps.low:.2f} to {steps.high:.2f} x"


def _recommendation(plan: PlanRow, result: PlanResult, alone_samples_per_s: float | None) -> str:
    """Return which way of training to take, with its command."""
    strategy = STRATEGIES.get(plan.strategy)
    if strategy is not None and strategy.running is None:
        return f"The fastest is {named(plan)}, which can be planned but not run here."
    gain = ""
    if alone_samples_per_s and plan.workers > 1:
        gain = f", {number(plan.samples_per_s / alone_samples_per_s)} times as fast as one worker"
    start = f"Train with {named(plan)}{gain}"
    if plan.workers == 1 and max(one.workers for one in result.ranking.plans) > 1:
        start = f"No further worker pays; train with {named(plan)}"
    return f"{start}: {command(plan, result)}"


def command(plan: PlanRow, result: PlanResult) -> str:
    """Return the command that trains as a plan says."""
    words = ["paceline train", result.model, f"--batch-size {result.batch_size}"]
    words += [f"--strategy {plan.strategy}", f"--workers {plan.workers}"]
    strategy = STRATEGIES.get(plan.strategy)
    usual = asdict(strategy.config(workers=plan.workers)) if strategy else {}
    for name, value in plan.config.items():
        if name not in _FOUND_BY_TRAINING and value is not None and value != usual.get(name):
            words.append(f"--codec {value}" if name == "codec" else f"--set {name}={value}")
    return " ".join([*words, *(["--balance auto"] if plan.is_balanced else [])])


def explanation(ranking: RankingRows) -> Iterator[str]:
    """Yield why each plan takes as long, what was refused and why, and what ± means."""
    for plan in _fastest(ranking.plans):
        yield f"{named(plan)}: {plan.explanation}"
    if (sentence := after_backward_sentence(ranking.plans)) is not None:
        yield sentence
    first = {row.strategy: row for row in reversed(ranking.refused)}
    for row in first.values():
        yield _refused(row, ranking.plans)
    if ranking.plans:
        yield _RANGE


def _refused(row: Refusal, plans: Sequence[PlanRow]) -> str:
    """Return that a strategy is refused, and what of it, if the rest of it is planned."""
    asked = row.strategy, row.workers
    planned = {plan.placement for plan in plans if (plan.strategy, plan.workers) == asked}
    name = f"a variant of {row.strategy}" if row.placement in planned else row.strategy
    where = f" ({row.placement})" if planned else ""
    return f"{name} is refused on {counted(row.workers, 'worker')}{where}: {row.why}"


def present(
    out: Console,
    result: PlanResult,
    title: str,
    folder: Path | None,
    *,
    as_json: bool,
    drawing: str,
) -> None:
    """Print a plan, as JSON or for people, with its explanation if there is a drawing of it.

    It was kept in the folder, if there is one.
    """
    if as_json:
        data = plan_json(result, folder, drawing)
        out.print_json(data=data, highlight=out.is_terminal)
        return
    show_plan(out, result, title)
    for text in (*explanation(result.ranking), drawing) if drawing else ():
        out.print(text, soft_wrap=True)
    if folder:
        out.print(f"written    {folder}/result.json, trace.json, report.html", soft_wrap=True)


def plan_json(result: PlanResult, folder: Path | None, drawing: str) -> dict[str, Any]:
    """Return what --json prints of a plan, which was kept in the folder if there is one."""
    data = result.model_dump(include={"model", "machine", "batch_size"})
    data |= {"origin": Origin.PREDICTED} | result.ranking.model_dump()
    data["findings"] = [one.model_dump() for one in result.findings]
    data |= {"drawing": drawing} if drawing else {}
    return data | ({"folder": str(folder)} if folder else {})
