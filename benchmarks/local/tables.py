"""The tables of result.json, as the README shows them.

    python benchmarks/local/tables.py

puts them into README.md, between the lines that say so.
"""

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import elastic  # noqa: E402
import exchange  # noqa: E402
import inner  # noqa: E402
import lora  # noqa: E402
import loss  # noqa: E402
import main  # noqa: E402
import steps_to_loss  # noqa: E402
import time_to_loss  # noqa: E402

import uneven  # noqa: E402
from readme import fill  # noqa: E402

_TEXTS = {
    "loss": loss.table,
    "uneven": uneven.text,
    "exchange": exchange.text,
    "inner": inner.text,
    "lora": lora.text,
}


def of(part: str, figures: dict[str, Any]) -> str:
    """Return the table of a part."""
    if part.startswith("elastic"):
        return elastic.text(part, figures)
    if part in steps_to_loss.CASES:
        return steps_to_loss.table(part, figures)
    if part.partition(" ")[0] in steps_to_loss.CASES:
        return time_to_loss.text(part, figures)
    return _TEXTS.get(part, main.text)(part, figures)


if __name__ == "__main__":
    fill(HERE, ["result.json"], of)
