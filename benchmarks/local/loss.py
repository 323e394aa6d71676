"""Compare the test loss of strategy local, for each round length, with synchronous training.

Each run is `paceline train` of a small GPT (sized_gpt.py) on two workers, with the same batches,
optimizer, schedule and number of tokens; its result is the test loss after the last step.
"""

from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

from sized_gpt import test_loss

from figures import table

_BATCH_SIZE, _NUM_STEPS = 32, 1500
_LEARNING_RATE = 0.003  # the best of 0.001, 0.003, 0.005 and 0.01 for synchronous training
_CONTEXT = 64  # tokens per sample
_SEEDS, _PERIODS, _CODECS = (0, 1, 2), (10, 30, 100), ("float32", "dynamic4")


def measure(quick: bool) -> dict[str, Any]:
    """Return the test losses of all runs, by seed."""
    seeds, periods = (_SEEDS[:1], _PERIODS[:1]) if quick else (_SEEDS, _PERIODS)
    steps = 20 if quick else _NUM_STEPS
    rows = [
        {
            "sync_every": period,
            "codec": codec,
            "losses": _losses(seeds, steps, "local", f"sync_every={period}", codec),
        }
        for period in periods
        for codec in _CODECS
    ]
    synchronous = _losses(seeds, steps, "host")
    return {"synchronous": synchronous, "rows": rows, "tokens": steps * _BATCH_SIZE * _CONTEXT}


def _losses(
    seeds: Sequence[int], steps: int, strategy: str, setting: str = "", codec: str = "float32"
) -> list[float]:
    """Return the test loss at the end of each run, in nats per byte."""
    options = ["--strategy", strategy, *(["--strategy-option", setting] if setting else [])]
    options += [] if codec == "float32" else ["--strategy-option", f"codec={codec}"]
    sizes = ("--workers", 2, "--batch-size", _BATCH_SIZE, "--learning-rate", _LEARNING_RATE)
    return [test_loss("tiny", *options, *sizes, steps=steps, seed=seed) for seed in seeds]


def text(figures: dict[str, Any]) -> str:
    """Return the table."""
    synchronous = figures["synchronous"]
    lines = [("", "synchronous", _values(synchronous), "")]
    for row in figures["rows"]:
        found = [own - other for own, other in zip(row["losses"], synchronous, strict=True)]
        beside = f"{mean(found):+.4f} ({min(found):+.4f} to {max(found):+.4f})"
        lines.append((str(row["sync_every"]), row["codec"], _values(row["losses"]), beside))
    head = ("rounds of", "travels as", "test loss, nats a byte", "beside synchronous training")
    return table("", head, lines)


def _values(losses: Sequence[float]) -> str:
    deviation = f" ± {stdev(losses):.4f}" if len(losses) > 1 else ""
    return f"{mean(losses):.4f}{deviation}"
