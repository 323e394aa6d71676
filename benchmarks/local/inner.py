"""Inner optimizers of local updates: AdamW and Muon, beside synchronous training with each.

    python benchmarks/local/inner.py [--quick]

Two ranks train a tiny GPT (sized_gpt.py) for 1,500 steps of 2,048 tokens, one seed. MuLoCo (arXiv
2505.23725) reports a smaller loss of Muon in rounds of as many steps.
"""

import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # GPUs are for benchmarks/gpu

import parts  # noqa: E402
from ranks import on_ranks  # noqa: E402

_KINDS, _PERIODS = ("adamw", "muon"), ("-", "10", "30", "100")


def measure(quick: bool) -> dict[str, Any]:
    """Return the test loss of each optimizer and round."""
    cases = [f"{kind} {every}" for kind in _KINDS for every in _PERIODS]
    return {case: on_ranks(HERE, "inner_runs", 2, quick, case=case)["loss"] for case in cases}


def text(_: str, figures: dict[str, float]) -> str:
    """Return the table."""
    lines = ["| inner optimizer | synchronous | H = 10 | H = 30 | H = 100 |", "|---" * 5 + "|"]
    for kind in _KINDS:
        losses = [figures[f"{kind} {every}"] for every in _PERIODS]
        shown = [f"{losses[0]:.3f}", *(f"{one:.3f} ({one - losses[0]:+.3f})" for one in losses[1:])]
        lines.append(f"| {kind} | {' | '.join(shown)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parts.run(HERE, {"inner": measure}, text)
