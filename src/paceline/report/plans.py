"""Show predicted plans in a terminal, as Markdown, as JSON or as an HTML page."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table as TerminalTable

from paceline.core.after_backward import AfterBackward
from paceline.core.facts import rounded
from paceline.core.timeline import Origin
from paceline.planner import Refusal
from paceline.planner.second_machine import BANDWIDTHS, Requirement, SecondMachine
from paceline.record.trace import read_trace
from paceline.records.result import PlanResult, PlanRow, RankingRows
from paceline.report import advice, figures
from paceline.report.figures import HOVER, Described, Panel, decades, escaped, figure_of
from paceline.report.format import counted, duration, nbytes, number, optional_share, ratio, share
from paceline.report.metrics import named
from paceline.report.page import Page, readable
from paceline.report.steps import two_steps
from paceline.report.tables import Rows, Table, plan_name, plans_table, ranged_step
from paceline.report.terminal import shown
from paceline.strategies import STRATEGIES

Form = Literal["text", "markdown", "json"]
_MOST_REMARKS = 2

_MOST_ALIKE, _MOST_OTHERS = 5, 3
_FOUND_BY_TRAINING = {"workers", "chunk"}  # omitted from commands: training chooses them
_POINTS: dict[str, Any] = {"mode": "lines+markers", "hovertemplate": HOVER}
_RANGE = "±: range that should contain the median of measured steps in 9 of 10 cases"


def plan_tables(plans: Sequence[PlanRow], alone_samples_per_s: float | None) -> dict[str, Table]:
    """Return up to two tables of the best plans, by title.

    The first table has plans that train like one worker with the whole batch. The second table has
    plans that change what is learned. A strategy has at most two rows: its best plan with a codec,
    and its best plan without. `plans`: best first. `alone_samples_per_s`: throughput of the best
    single worker; speed-ups in the first table are relative to it.
    """
    alike = list(_fastest(plan for plan in plans if plan.is_same_training))
    alone = [plan for plan in alike[_MOST_ALIKE:] if plan.workers == 1]
    alike = [*alike[: _MOST_ALIKE - len(alone)], *alone]
    others = list(_fastest(plan for plan in plans if not plan.is_same_training))[:_MOST_OTHERS]
    found = {}
    if alike:
        one = alone_samples_per_s
        gains = {} if one is None else {"x one": [number(p.samples_per_s / one) for p in alike]}
        found["Same training"] = _table(alike, gains)
    if others:
        found["Changes what is learned"] = _table(others, {"steps to loss": map(_learned, others)})
    return found


def _fastest(plans: Iterable[PlanRow]) -> Iterator[PlanRow]:
    """Yield the best plan for one worker, and each strategy's best with and without a codec.

    `plans`: best first.
    """
    seen: set[object] = set()
    for plan in plans:
        key = "one worker" if plan.workers == 1 else (plan.strategy, plan.codec is None)
        if key not in seen:
            seen.add(key)
            yield plan


def _table(plans: Sequence[PlanRow], more: Mapping[str, Iterable[str]]) -> Table:
    """Return a table of plans; `more`: names of additional columns, each with its cells."""
    rows: Rows = []
    for plan, *cells in zip(plans, *more.values(), strict=True):
        placement = "" if plan.placement == "as listed" else f" ({plan.placement})"
        exposed = share(ratio(plan.exposed_s, plan.step_s), 0)
        speed = str(plan.workers), ranged_step(plan), number(plan.samples_per_s), exposed
        rows.append(
            (plan_name(plan) + placement, *speed, nbytes(plan.wire_nbytes_per_step), *cells)
        )
    head = ("strategy", "workers", "step", "samples/s", "exposed", "wire/step", *more)
    return Table(head, rows)


def _learned(plan: PlanRow) -> str:
    """Format `plan.steps_to_loss`, a factor, such as "1.05-1.20 x"; "unknown" for None."""
    steps = plan.steps_to_loss
    if steps is None:
        return "unknown"
    if steps.low == steps.high:
        return f"{steps.median:.2f} x"
    return f"{steps.low:.2f}-{steps.high:.2f} x"


def recommendation(result: PlanResult) -> str:
    """Return a sentence with the recommended plan and the command that trains with it.

    Returns "" if no plan is possible.
    """
    plan, alone = result.ranking.recommended, result.ranking.alone_samples_per_s
    if plan is None:
        return ""
    strategy = STRATEGIES.get(plan.strategy)
    if strategy is not None and strategy.running is None:
        return f"The fastest is {named(plan)}, which can be planned but not run here."
    gain = ""
    if alone and plan.workers > 1:
        gain = f", {number(plan.samples_per_s / alone)} times as fast as one worker"
    start = f"Train with {named(plan)}{gain}"
    if plan.workers == 1 and max(one.workers for one in result.ranking.plans) > 1:
        start = f"More workers are not faster; train with {named(plan)}"
    return f"{start}: {command(plan, result)}"


def command(plan: PlanRow, result: PlanResult) -> str:
    """Return the `paceline train` command with the plan's configuration."""
    strategy = STRATEGIES.get(plan.strategy)
    words = ["paceline train", result.model, f"--batch-size {result.batch_size}"]
    words.append(f"--strategy {plan.strategy}")
    if plan.hosts > 1 and strategy is not None and not strategy.is_led:
        nodes = f"--nnodes {plan.hosts} --nproc-per-node {plan.workers // plan.hosts}"
        words.insert(0, f"on each host, torchrun {nodes} --node-rank N --master-addr HOST -m")
    else:
        words.append(f"--workers {plan.workers}")
    usual = asdict(strategy.config(workers=plan.workers)) if strategy else {}
    for name, value in plan.config.items():
        if name not in _FOUND_BY_TRAINING and value is not None and value != usual.get(name):
            words.append(
                f"--codec {value}" if name == "codec" else f"--strategy-option {name}={value}"
            )
    return " ".join([*words, *(["--balance auto"] if plan.is_balanced else [])])


def explanation(ranking: RankingRows) -> Iterator[str]:
    """Yield sentences on the plans' step times, the refused strategies, and the meaning of ±."""
    for plan in _fastest(ranking.plans):
        yield f"{named(plan)}: {plan.explanation}"
    if (sentence := of_after_backward(ranking.plans)) is not None:
        yield sentence
    first = {row.strategy: row for row in reversed(ranking.refused)}
    for row in first.values():
        yield _refused(row, ranking.plans)
    if ranking.plans:
        yield _RANGE


def of_after_backward(plans: Sequence[PlanRow]) -> str | None:
    """Return a sentence on how long each strategy still communicates after backward.

    Considers only plans without a codec: the best, and others with as many workers on the same
    devices. `plans`: best first. Returns None if no plan reports these times.
    """
    rows = [one for one in plans if one.codec is None and one.after_backward is not None]
    if not rows:
        return None
    first, found = rows[0], dict[str, AfterBackward]()
    for one in rows:
        alike = (one.workers, one.placement) == (first.workers, first.placement)
        if alike and one.after_backward is not None:
            found.setdefault(one.strategy, one.after_backward)
    backward = duration(min(one.backward_s for one in found.values()))
    left = ", ".join(f"{duration(one.left_s)} with {n} ({_hides(one)})" for n, one in found.items())
    workers = f"{backward} on each of {first.workers} workers"
    text = f"after backward ({workers}), the communication left is {left}"
    if len(found) == 1:
        return text
    ordered = sorted(found.items(), key=lambda item: item[1].overhead_s)
    added = " < ".join(f"{duration(one.overhead_s)} ({name})" for name, one in ordered)
    return f"{text}; added to backward: {added} (Le et al. 2018, section 3.2)"


def _hides(times: AfterBackward) -> str:
    text = f"hides {duration(times.hidden_s)} of {duration(times.exchange_s)}"
    return text + (f"; GPU synchronisation adds {duration(times.sync_s)}" if times.sync_s else "")


def of_second_machine(found: SecondMachine) -> Iterator[str]:
    """Yield sentences on the slowest second machine that pays, and the slowest link.

    They pay if all hosts together train faster than the first host alone.
    """
    speeds, links = [], []
    for one in found.requirements:
        speed, bits_per_s = one.speed, one.bits_per_s[0]
        speeds.append(f"{'none' if speed is None else share(speed, 0)} {label(one)}")
        least = "none" if bits_per_s is None else rounded(bits_per_s, "bit/s")
        links.append(f"{least}{' or less' * (bits_per_s == BANDWIDTHS[0])} {label(one)}")
    pays = f"that pays over {found.first_host} alone"
    yield f"slowest second machine {pays}, as a share of its stated speed: {', '.join(speeds)}"
    yield f"slowest link between hosts {pays}: {', '.join(links)}"


def label(one: Requirement) -> str:
    """Name the exchange to which a requirement applies, such as "without a codec".

    If it is unknown how many steps strategy local needs to reach a loss, the name ends with a note
    that samples/s are compared.
    """
    text = {"plain": "without a codec", "codec": "with dynamic8", "local": "with strategy local"}
    return text[one.exchange] + (
        "" if one.is_learning_known else " (in samples/s: its steps to a loss are unknown)"
    )


def _refused(row: Refusal, plans: Sequence[PlanRow]) -> str:
    """Return a sentence on why a strategy is refused on a number of workers.

    If `plans` has plans of the strategy for as many workers, the sentence also says how the refused
    plan chose its devices, such as "spread".
    """
    asked = row.strategy, row.workers
    planned = {plan.placement for plan in plans if (plan.strategy, plan.workers) == asked}
    name = f"a variant of {row.strategy}" if row.placement in planned else row.strategy
    where = f" ({row.placement})" if planned else ""
    return f"{name} is refused on {counted(row.workers, 'worker')}{where}: {row.why}"


def present(
    out: Console, result: PlanResult, title: str, folder: Path | None, *, form: Form, drawing: str
) -> None:
    """Print plans as text, Markdown or JSON.

    `folder`: where the plans were saved, or None. `drawing`: picture of the best plan as text;
    unless it is "", explanations are printed, too.
    """
    if form == "json":
        out.print_json(data=_data(result, folder, drawing), highlight=out.is_terminal)
        return
    remarks = list(advice.shown(result.findings))[:_MOST_REMARKS]
    texts = [recommendation(result), *remarks]
    if form == "markdown":
        out.print(_markdown(result, title, texts), soft_wrap=True)
        return
    ranking = result.ranking
    for table in in_terminal(ranking.plans, title, ranking.alone_samples_per_s):
        out.print(table)
    if drawing:
        needed = result.second_machine
        texts += [*explanation(ranking), *(of_second_machine(needed) if needed else ()), drawing]
    if folder:
        texts.append(f"written    {folder}/result.json, trace.json, report.html")
    for text in filter(None, texts):
        out.print(text, soft_wrap=True)


def in_terminal(
    plans: Sequence[PlanRow], title: str, alone_samples_per_s: float | None
) -> Iterator[TerminalTable]:
    """Yield the tables of `plan_tables` for a terminal; the first title begins with `title`."""
    for name, table in plan_tables(plans, alone_samples_per_s).items():
        yield shown(f"{title}: {name.lower()}" if title else name, table, gap=1)
        title = ""


def _markdown(result: PlanResult, title: str, texts: Sequence[str]) -> str:
    tables = plan_tables(result.ranking.plans, result.ranking.alone_samples_per_s)
    parts = [f"**{title}**"]
    for name, table in tables.items():
        parts += [f"*{name}*", table.as_markdown]
    return "\n\n".join(filter(None, [*parts, *texts]))


def _data(result: PlanResult, folder: Path | None, drawing: str) -> dict[str, Any]:
    """Return the object that `paceline plan --json` prints."""
    data = result.model_dump(include={"model", "machine", "batch_size"})
    data |= {"origin": Origin.PREDICTED} | result.ranking.model_dump()
    data["findings"] = [one.model_dump() for one in result.findings]
    if result.second_machine is not None:
        data["second_machine"] = asdict(result.second_machine)
    data |= {"drawing": drawing} if drawing else {}
    return data | ({"folder": str(folder)} if folder else {})


def page_of(result: PlanResult, folder: Path) -> Page:
    """Build the HTML page of a `paceline plan`; `folder` contains trace.json."""
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
        "refused": _refusals(refused) if refused else None,
        "steps": two_steps(list(read_trace(folder / "trace.json").values())),
        "settings": {"Asked for": readable(asked), "Made with": readable(result.facts)},
    }
    return Page(f"{result.model} planned, {result.id}", "plan.html", content)


def _refusals(refused: Sequence[Refusal]) -> Table:
    rows: Rows = [(row.strategy, str(row.workers), row.placement, row.why) for row in refused]
    return Table(("strategy", "workers", "devices", "why"), rows, (0, 2, 3))


def _tiles(ranking: RankingRows) -> list[tuple[str, str, str]]:
    if not ranking.plans:
        return [("plans", "none", "all strategies were refused; see the reasons below")]
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
        lines.append(figures.line(i, strategy, numbers, rates, customdata=told, **_POINTS))
    counts = {plan.workers for plan in plans}
    is_wide = max(counts) > 32 * min(counts)
    x = {"title": "workers"} | (decades(counts) if is_wide else figures.whole_numbers(max(counts)))
    panel = Panel(lines, x, {"title": "samples/s", "rangemode": "tozero"})
    return figure_of([panel], 330)


def _second_machine(found: SecondMachine) -> Described:
    """Draw the least bandwidth with which a second machine helps, for each machine speed."""
    names = [str(Fraction(speed)) for speed in found.speeds]
    lines = []
    for i, one in enumerate(found.requirements):
        least = [None if bits is None else bits / 1e6 for bits in one.bits_per_s]
        told = ["" if bits is None else rounded(bits, "bit/s") for bits in one.bits_per_s]
        lines.append(figures.line(i, label(one), names, least, customdata=told, **_POINTS))
    shown = [value for drawn in lines for value in drawn["y"] if value is not None]
    x: Described = {"title": "speed of the second machine", "type": "category"}
    x |= {"categoryorder": "array", "categoryarray": names}
    return figure_of([Panel(lines, x, {"title": "Mbit/s"} | decades(shown))], 330)
