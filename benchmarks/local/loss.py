"""What rounds of inner steps cost in loss: strategy local beside synchronous training.

    python benchmarks/local/loss.py [--quick]

Each run is `paceline train` of a small GPT (sized_gpt.py) on two workers, with the same batches,
optimizer, schedule and number of tokens; the test loss after the last step counts. With --quick a
few steps show that everything works; the figures mean nothing, and are not written.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # GPUs are for benchmarks/gpu
os.environ["OMP_NUM_THREADS"] = "1"

import parts  # noqa: E402
from paceline.core.wire_format import wire_format  # noqa: E402

_WORKERS, _BATCH_SIZE, _NUM_STEPS, _WARM_UP = 2, 32, 1500, 100
_LEARNING_RATE = 0.003  # the best of 0.001, 0.003, 0.005 and 0.01 for synchronous training
_CONTEXT = 64  # tokens of a sample
_SEEDS, _PERIODS, _CODECS = (0, 1, 2), (10, 30, 100), ("float32", "dynamic4")
_DEADLINE_S = 900.0


def measure(quick: bool) -> dict[str, Any]:
    """Return the test losses of all runs, by seed."""
    seeds = _SEEDS[:1] if quick else _SEEDS
    periods = _PERIODS[:1] if quick else _PERIODS
    steps = 20 if quick else _NUM_STEPS
    synchronous = [_loss(["--strategy=host"], seed, steps) for seed in seeds]
    rows = []
    for period in periods:
        for codec in _CODECS:
            options = ["--strategy=local", f"--set=sync_every={period}"]
            options += [] if codec == "float32" else [f"--set=codec={codec}"]
            losses = [_loss(options, seed, steps) for seed in seeds]
            rows.append({"sync_every": period, "codec": codec, "losses": losses})
    tokens = steps * _BATCH_SIZE * _CONTEXT
    return {"synchronous": synchronous, "rows": rows, "tokens": tokens}


def _loss(options: Sequence[str], seed: int, steps: int) -> float:
    """Return the test loss at the end of a run, in nats a byte."""
    command = [sys.executable, "-m", "paceline", "train", "sized_gpt:tiny", *options, "--json"]
    command += [f"--workers={_WORKERS}", f"--batch-size={_BATCH_SIZE}", f"--steps={steps}"]
    command += ["--optimizer=adamw", f"--learning-rate={_LEARNING_RATE}", "--schedule=cosine"]
    command += [f"--warmup-steps={min(_WARM_UP, steps // 2)}", f"--seed={seed}", "--profile-s=1"]
    with tempfile.TemporaryDirectory() as folder:
        command += ["--checkpoint-every=never", f"--output={folder}"]
        subprocess.run(command, cwd=HERE, check=True, timeout=_DEADLINE_S, stdout=subprocess.PIPE)
        (path,) = Path(folder).glob("*/result.json")
        loss: float = json.loads(path.read_text())["epochs"][-1]["test_loss"]
    print(f"{' '.join(options)} seed {seed}: {loss:.4f}", file=sys.stderr, flush=True)
    return loss


def text(part: str, figures: dict[str, Any]) -> str:
    """Return the table, and the rows that loss_table.toml has of it."""
    return "\n".join([table(part, figures), "", *_toml_rows(figures)])


def table(part: str, figures: dict[str, Any]) -> str:
    """Return the table."""
    synchronous = figures["synchronous"]
    lines = ["| rounds of | travels as | test loss, nats a byte | beside synchronous training |"]
    lines += ["|---" * 4 + "|", f"| | synchronous | {_values(synchronous)} | |"]
    for row in figures["rows"]:
        found = _differences(row, synchronous)
        beside = f"{mean(found):+.4f} ({min(found):+.4f} to {max(found):+.4f})"
        lines.append(
            f"| {row['sync_every']} | {row['codec']} | {_values(row['losses'])} | {beside} |"
        )
    return "\n".join(lines)


def _differences(row: dict[str, Any], synchronous: Sequence[float]) -> list[float]:
    """Return how much higher each seed's loss is than that of synchronous training."""
    return [own - other for own, other in zip(row["losses"], synchronous, strict=True)]


def _toml_rows(figures: dict[str, Any]) -> list[str]:
    return [
        _toml_row(row, _differences(row, figures["synchronous"]), figures["tokens"])
        for row in figures["rows"]
    ]


def _toml_row(row: dict[str, Any], differences: Sequence[float], tokens: int) -> str:
    bits = 32 if row["codec"] == "float32" else wire_format(row["codec"]).value_bits
    middle = mean(differences)
    spread = max(abs(one - middle) for one in differences)
    return (
        f"[[rows]]  # {row['codec']}\nsync_every = {row['sync_every']}\nworkers = {_WORKERS}\n"
        f"bits = {bits}\ndifference = {middle:.4f}\nspread = {spread:.4f}\n"
        f'seeds = {len(differences)}\nmodel = "a GPT of 121,000 parameters"\n'
        f"tokens = {tokens}\n"
    )


def _values(losses: Sequence[float]) -> str:
    deviation = f" ± {stdev(losses):.4f}" if len(losses) > 1 else ""
    return f"{mean(losses):.4f}{deviation}"


if __name__ == "__main__":
    parts.run(HERE, {"loss": measure}, text)
