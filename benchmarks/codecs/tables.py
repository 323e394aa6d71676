"""The parts, and the tables of result.json, as the README shows them.

    python benchmarks/codecs/tables.py

puts them into README.md, between the lines that say so.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import speed  # noqa: E402
import table2  # noqa: E402
import table2_text  # noqa: E402
import training  # noqa: E402
import two_hosts  # noqa: E402

from readme import fill  # noqa: E402


class Part(NamedTuple):
    """What a part is called, what measures it, quickly or not, and what makes tables of it."""

    title: str
    measure: Callable[[bool], dict[str, Any]]
    text: Callable[[dict[str, Any]], str]


PARTS = {
    "kernels": Part("Kernels on the CPU", speed.measure, speed.text),
    "table2": Part("Table 2 of the paper", table2.measure, table2_text.text),
    "training": Part("Training", training.measure, training.text),
    **{
        rate: Part(
            f"AlexNet, 16 images a rank: {place}", partial(two_hosts.measure, rate), two_hosts.text
        )
        for rate, place in (
            ("1gbit", "two hosts at 1 Gbit/s"),
            ("100mbit", "two hosts at 100 Mbit/s"),
            ("loopback", "two ranks on loopback"),
        )
    },
}


def of(part: str, figures: dict[str, Any]) -> str:
    """Return the tables of a part."""
    return f"## {PARTS[part].title}\n\n{PARTS[part].text(figures)}"


if __name__ == "__main__":
    fill(HERE, ("result.json",), of)
