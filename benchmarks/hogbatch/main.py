"""Measure hogbatch with uneven workers: the coordinator's cost and the policies' gains."""

from typing import Any

import coordinator
import ideal
import public
import ratios
import small
import target

from figures import Part, shown, table


def of_coordinator(figures: dict[str, Any]) -> str:
    """Return the table of part coordinator."""
    messages = f"{figures['messages_per_s']:,.0f}"
    rows = [
        ("messages per second of the coordinator's CPU", f"{figures['messages_per_cpu_s']:,.0f}"),
        ("messages per second, with workers that hardly compute", messages),
        ("between two batches of a worker", f"{shown(figures['between_batches_s'], 1e6, 0)} us"),
        ("without a coordinator", f"{shown(figures['unasked_s'], 1e6, 0)} us"),
        ("share of a worker's time at batch 64", f"{figures['share_of_worker']:.2%}"),
        ("of which asking", f"{figures['share_of_asking']:.2%}"),
    ]
    return table("The coordinator", ("", ""), rows)


def of_ratios(figures: dict[str, Any]) -> str:
    """Return the table of part ratios."""
    rows = [
        (
            ratio,
            f"1 to {row['most']}",
            ", ".join(f"{count:,.0f}" for count in row["updates"].values()),
            "-" if row["factor"] is None else f"{row['factor']:.2f}",
            ", ".join(f"{share:.1%}" for share in row["busy"].values()),
            f"{row['samples_per_s']:,.0f}",
            f"{row['share_of_slower']:.1%}",
            "-" if row["planned_share"] is None else f"{row['planned_share']:.1%}",
        )
        for ratio, row in figures.items()
    ]
    head = (
        *("speeds", "batch", "updates of each", "factor", "busy", "samples/s"),
        *("slower worker's share of all updates", "planned"),
    )
    return table("Policy adaptive, second half of the run", head, rows)


def of_small(figures: dict[str, Any]) -> str:
    """Return the table of part small."""
    rows = [
        (size, *(shown(ways[way][threads], 1e6, 0) for threads in "12" for way in ("C++", "torch")))
        for size, ways in figures.items()
    ]
    head = ("samples", "C++", "torch", "C++, two threads at once", "torch, two threads at once")
    return table("Microseconds of a sub-batch", head, rows)


def of_target(figures: dict[str, Any]) -> str:
    """Return the table of part target."""
    rows = [
        (
            *(ratio, way, _shown(row["rate"]), _shown(row["median_s"])),
            *(", ".join(map(_shown, row["seconds"])), _times(row.get("faster"))),
        )
        for ratio, ways in figures.items()
        for way, row in ways.items()
    ]
    head = ("speeds", "way", "learning rate", "median s", "s of each seed", "times as fast")
    return table("Time to the target loss", head, rows)


def of_ideal(figures: dict[str, Any]) -> str:
    """Return the table of part ideal."""
    rows = [
        (speeds, way, _times(row["faster"]), f"{row['updates']:,}")
        for speeds, ways in figures.items()
        for way, row in ways.items()
    ]
    head = ("speeds", "way", "times as fast", "updates to the loss")
    return table("Update by update, as if nothing but arithmetic took time", head, rows)


def of_public(figures: dict[str, Any]) -> str:
    """Return the table of part public."""
    rows = [(way, _shown(row["epoch_s"]), _shown(row["seconds"])) for way, row in figures.items()]
    return table("Public alternatives", ("way", "s an epoch", "s to the target"), rows)


def _times(faster: dict[str, float] | None) -> str:
    """Format the speed-up over the fast worker alone: of the medians, and its range."""
    if faster is None:
        return "-"
    return f"{faster['of_medians']:.2f} ({faster['least']:.2f} to {faster['most']:.2f})"


def _shown(value: float | None) -> str:
    return "not reached" if value is None else f"{value:.3g}"


PARTS = {
    "coordinator": Part(coordinator.measure, of_coordinator),
    "ratios": Part(ratios.measure, of_ratios),
    "small": Part(small.measure, of_small),
    "target": Part(target.measure, of_target),
    "ideal": Part(ideal.measure, of_ideal),
    "public": Part(public.measure, of_public),
}
