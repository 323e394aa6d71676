"""Compare GPT steps on two ranks: Paceline's exchanges, and DistributedDataParallel.

Most parts are a model and a link. Links between two network namespaces require root.
"""

from functools import partial
from pathlib import Path
from typing import Any

from hosts import TwoHosts, on_hosts

from figures import Part, shown, table
from ranks import on_ranks

_HERE = Path(__file__).parent
_MODELS, _WIRES = ("gpt-10m", "gpt-30m"), ("loopback", "1gbit", "200mbit")


def measure(model: str, wire: str, quick: bool) -> dict[str, Any]:
    """Return the figures of a model over a link; "loopback" is one machine's shared memory."""
    if wire == "loopback":
        return on_ranks(_HERE, "steps_of_gpt", 2, quick, case=model)
    with TwoHosts(wire) as hosts:
        return on_hosts(hosts, _HERE, "steps_of_gpt", quick, (model,))


def stall(quick: bool) -> dict[str, Any]:
    """Return a GPT's step time, and how long a checkpoint delays training."""
    return on_ranks(_HERE, "checkpoints_of_gpt", 2, quick)


def _of_checkpoints(figures: dict[str, Any]) -> str:
    lines = [(name, shown(figures[name], 1e3, 0)) for name in ("step", "stall")]
    share = f"{figures['share_of_a_step']:.1%} of a step for {figures['nbytes'] / 1e6:,.0f} MB"
    return table(f"checkpoints of gpt-30m on 2 ranks: {share}", ("", "ms"), lines)


def _of_steps(part: str, figures: dict[str, Any]) -> str:
    rows = figures["variants"]
    best = min(row["seconds"]["median"] for name, row in rows.items() if name.startswith("DDP"))
    lines = []
    for name, row in sorted(rows.items(), key=lambda one: one[1]["seconds"]["median"]):
        own = row["seconds"]["median"]
        lines.append((name, shown(row["seconds"], 1e3, 0), f"{own / best:.3f}"))
    head = ("variant", "ms a step, median [quartiles]", "of the best DDP's time")
    return f"{table(part, head, lines)}\n\n`auto` took {figures['auto']}"


PARTS = {
    **{
        f"{model} {wire}": Part(
            partial(measure, model, wire), partial(_of_steps, f"{model} {wire}")
        )
        for model in _MODELS
        for wire in _WIRES
    },
    "checkpoints": Part(stall, _of_checkpoints),
}
