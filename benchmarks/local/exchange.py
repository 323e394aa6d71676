"""Compare an exchange's bytes with the plan, and measure the share that `delay` hides.

Two hosts at 1 Gbit/s train a GPT of ten million parameters, in rounds of ten steps with two
fragments; the exchange of a fragment overlaps three steps. LocalUpdates counts the bytes of its
messages; the kernel counts the bytes of whole frames.
"""

from pathlib import Path
from typing import Any

import sized_gpt
import torch
from hosts import TwoHosts, on_hosts
from steps_to_loss import CASES

from command import paceline
from figures import table
from paceline import LocalUpdates
from paceline.links.group import Group
from paceline.training.data.batch import Batch
from steps import wire_nbytes

_HERE, _CASE, _CODECS = Path(__file__).parent, "10m", (None, "dynamic8", "dynamic4")
SYNC_EVERY, FRAGMENTS, DELAY = 10, 2, 3
_NUM_ROUNDS = 4


def part(quick: bool) -> dict[str, Any]:
    """Return each codec's bytes per round, as planned, sent and framed, and its hidden share."""
    case = "0.1m" if quick else _CASE
    found: dict[str, Any] = {}
    with TwoHosts("1gbit") as hosts:
        for codec in _CODECS:
            own = on_hosts(hosts, _HERE, "exchange", quick, (case, codec or ""))
            found[codec or "float32"] = {**own, "planned_nbytes": _planned(case, codec)}
    return found


def _planned(case: str, codec: str | None) -> float:
    """Return the bytes that a host sends per round according to `paceline plan`."""
    known = CASES[case]
    settings = {"sync_every": SYNC_EVERY, "fragments": FRAGMENTS, "delay": DELAY}
    settings |= {"codec": codec} if codec else {}
    plans = paceline(
        *("plan", f"sized_gpt:{known.model}", "--machine=two-hosts-gigabit", "--workers=2"),
        *("--strategy=local", f"--batch-size={2 * known.batch_size}"),
        *(f"--strategy-option={name}={value}" for name, value in settings.items()),
        cwd=_HERE,
    )["plans"]
    (own,) = (one for one in plans if one["workers"] == 2 and one["codec"] == codec)
    return float(own["wire_nbytes_per_step"]) * SYNC_EVERY


def measure(group: Group, quick: bool, part: str, codec: str) -> dict[str, float]:
    """Return this host's sent bytes per round, and the hidden share of exchange time."""
    case = CASES[part]
    recipe = getattr(sized_gpt, case.model)()
    torch.manual_seed(0)
    model = recipe.model()
    optimizer = torch.optim.AdamW(model.parameters(), case.learning_rate)
    inputs, targets = Batch.of(recipe.samples.__getitems__(range(case.batch_size)))
    updates = LocalUpdates(
        model, optimizer, SYNC_EVERY, fragments=FRAGMENTS, delay=DELAY, codec=codec or None
    )
    frames = []
    statistics: list[Any] = []
    for step in range(_NUM_ROUNDS * SYNC_EVERY + DELAY + 1):
        if step % SYNC_EVERY == DELAY + 1:  # the last sent fragment has arrived
            frames.append(wire_nbytes()["tx"])
            statistics.append(updates.statistics())
        recipe.loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    group.barrier()
    first, last = statistics[1], statistics[-1]  # the first round warms up
    updates.close()
    num_rounds = len(statistics) - 2
    hidden_s, exposed_s = last.hidden_s - first.hidden_s, last.exposed_s - first.exposed_s
    return {
        "nbytes": (last.bytes_sent - first.bytes_sent) / num_rounds,
        "frames_nbytes": (frames[-1] - frames[1]) / num_rounds,
        "hidden_share": hidden_s / (hidden_s + exposed_s),
    }


def text(figures: dict[str, Any]) -> str:
    """Return the table."""
    lines = []
    for name, own in figures.items():
        planned, sent = own["planned_nbytes"], own["nbytes"]
        nbytes = f"{planned:,.0f}", f"{sent:,.0f}", f"{sent / planned - 1:+.1%}"
        frames, hidden = f"{own['frames_nbytes']:,.0f}", f"{own['hidden_share']:.0%}"
        lines.append((name, *nbytes, frames, hidden))
    counted = ("bytes a round, planned", "sent", "beside the plan", "frames", "hidden")
    return table("", ("travels as", *counted), lines)
