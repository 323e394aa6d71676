"""The tables of result.json, as the README shows them."""

from typing import Any

from figures import shown
from readme import table

CHECKPOINTS, TEN_MINUTES = "checkpoints", "ten minutes"


def of(part: str, figures: dict[str, Any]) -> str:
    """Return the table of a part."""
    if part == CHECKPOINTS:
        return _of_checkpoints(figures)
    return _of_curve(figures) if part == TEN_MINUTES else _of_steps(part, figures)


def _of_checkpoints(figures: dict[str, Any]) -> str:
    lines = [(name, shown(figures[name], 1e3, 0)) for name in ("step", "stall")]
    share = f"{figures['share_of_a_step']:.1%} of a step for {figures['nbytes'] / 1e6:,.0f} MB"
    return table(f"checkpoints of gpt-30m on 2 ranks: {share}", ("", "ms"), lines)


def _of_curve(figures: dict[str, Any]) -> str:
    title = (
        f"gpt, 3.3 M parameters, batches of 16 windows of 256 bytes, 2 workers of one core: "
        f"{figures['seconds']:.0f} s, {figures['tokens_per_s']:,.0f} tokens/s"
    )
    steps, bits = zip(*figures["curve"], strict=True)
    cells = [["bits per byte", *(f"{one:.3f}" for one in bits)]]
    return table(title, ["steps", *map(str, steps)], cells)


def _of_steps(part: str, figures: dict[str, Any]) -> str:
    rows = figures["variants"]
    best = min(row["seconds"]["median"] for name, row in rows.items() if name.startswith("DDP"))
    lines = []
    for name, row in sorted(rows.items(), key=lambda one: one[1]["seconds"]["median"]):
        own = row["seconds"]["median"]
        lines.append((name, shown(row["seconds"], 1e3, 0), f"{own / best:.3f}"))
    head = ("variant", "ms a step, median [quartiles]", "of the best DDP's time")
    return f"{table(part, head, lines)}\n\n`auto` took {figures['auto']}"
