"""Measure updates and busy time of a fast and a slower worker under the adaptive policy."""

from typing import Any

from cases import runner_of, settings, trained

from figures import table
from paceline.strategies.hogbatch.statistics import BatchLog, utilisation

_RATIOS = {4: 64, 16: 512, 236: 8192}  # slowdown: maximum batch size


def measure(quick: bool) -> dict[str, Any]:
    """Return figures per ratio; `updates`, `factor` and `busy` cover the run's second half."""
    ratios = {4: _RATIOS[4]} if quick else _RATIOS
    return {f"{ratio}:1": _of(ratio, most, quick) for ratio, most in ratios.items()}


def _of(ratio: int, most: int, quick: bool) -> dict[str, Any]:
    wanted = settings(
        quick,
        workers=f"cpu:1,cpu:1@slow={ratio}",
        options={"policy": "adaptive", "cpu_batch": [1, most]},
        epochs=2 if quick else 4,
    )
    with runner_of(wanted) as runner:
        outcome = trained(runner)
        log = runner.coordinator.log
    late, half_s = BatchLog(), max(one.ended_s for one in log) / 2
    for one in log:
        if one.started_s >= half_s:
            late.append(one)
    made_late = late.made([worker.name for worker in outcome.workers])
    updates = {name: len(own) for name, own in made_late.items()}
    made = list(updates.values())
    slower = outcome.workers[1]
    return {
        "share_of_slower": slower.updates_share,
        "planned_share": slower.predicted_share,
        "most": most,
        "updates": updates,
        "factor": max(made) / min(made) if min(made) else None,
        "busy": utilisation(made_late),
        "samples_per_s": outcome.samples_per_s,
    }


def text(figures: dict[str, Any]) -> str:
    """Return the table."""
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
