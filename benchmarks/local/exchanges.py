"""Rounds of local updates with fragments that travel beside steps: their bytes, and hidden time."""

from pathlib import Path
from typing import Any

import sized_gpt
import torch
from steps_to_loss import CASES

import paceline
from paceline.links.group import Group
from paceline.training.data.batch import Batch

SYNC_EVERY, FRAGMENTS, DELAY = 10, 2, 3
_NUM_ROUNDS = 4
_COUNTED = Path("/proc/net/dev")


def measure(group: Group, quick: bool, part: str, codec: str) -> dict[str, float]:
    """Return the bytes that this host sends in a round, and the part of the exchanges' time."""
    case = CASES[part]
    recipe = getattr(sized_gpt, case.model)()
    torch.manual_seed(0)
    model = recipe.model()
    optimizer = torch.optim.AdamW(model.parameters(), case.learning_rate)
    inputs, targets = Batch.of(recipe.samples.__getitems__(range(case.batch_size)))
    updates = paceline.LocalUpdates(
        model, optimizer, SYNC_EVERY, fragments=FRAGMENTS, delay=DELAY, codec=codec or None
    )
    frames = []
    statistics: list[Any] = []
    for step in range(_NUM_ROUNDS * SYNC_EVERY + DELAY + 1):
        if step % SYNC_EVERY == DELAY + 1:  # the fragment that was sent last has come
            frames.append(_sent_frames_nbytes())
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


def _sent_frames_nbytes() -> int:
    """Return the bytes of all frames that this host has sent so far."""
    lines = _COUNTED.read_text().splitlines()
    (counts,) = (line.split(":")[1].split() for line in lines if line.lstrip().startswith("wire:"))
    return int(counts[8])
