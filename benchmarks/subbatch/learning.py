"""Whether training with 8-bit activations and errors ends as well as with float32: F-tests of it.

What is trained is in model_parallel.py, by ranks; tests and tables are those of benchmarks/codecs.
"""

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "codecs"))  # after our own

import training  # noqa: E402

from ranks import on_ranks  # noqa: E402

_PRINTED = "Section 3.4 prints F(4,4) = 0.54, p = 0.71 for model parallelism on MNIST."


def measure(quick: bool) -> dict[str, Any]:
    """Return accuracies and tests of all tasks."""
    return training.tested(on_ranks(HERE, "model_parallel", training.NUM_RANKS, quick))


def text(figures: dict[str, Any]) -> str:
    """Return the tables."""
    return f"{training.text(figures)}\n\n{_PRINTED}"
