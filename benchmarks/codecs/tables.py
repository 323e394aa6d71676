"""The parts, and the tables of result.json, as the README shows them.

    python benchmarks/codecs/tables.py

puts them into README.md, between the lines that say so.
"""

import sys
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import speed  # noqa: E402
import table2  # noqa: E402
import training  # noqa: E402
import two_hosts  # noqa: E402

from readme import Part, fill, under_title  # noqa: E402

PARTS = {
    "kernels": Part("Kernels on the CPU", speed.measure, speed.text),
    "table2": Part("Table 2 of the paper", table2.measure, table2.text),
    "training": Part("Training", training.measure, training.text),
    **{
        rate: Part(
            f"AlexNet, 16 images a rank: {place}",
            partial(two_hosts.measure, rate),
            partial(two_hosts.text, rate),
        )
        for rate, place in (
            ("1gbit", "two hosts at 1 Gbit/s"),
            ("100mbit", "two hosts at 100 Mbit/s"),
            ("loopback", "two ranks on loopback"),
        )
    },
}

of = partial(under_title, PARTS)


if __name__ == "__main__":
    fill(HERE, ("result.json",), of)
