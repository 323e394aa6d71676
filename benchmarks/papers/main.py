"""The tables of the five papers, beside the planner's values.

    python benchmarks/papers/main.py [cgdp] [wheel] [dgx1] [hogbatch] [dettmers8bit]
        [--json] [--fill]

Without a name, all of them. With --json one JSON object on standard output; with --fill the tables
are put into the papers' pages.
"""

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from paceline.report.terminal import console
from papers import NAMES, paper
from papers.headline import as_object, fill_page, show


def main() -> None:
    """Print the tables, and the errors of what is predicted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="paper", help=", ".join(NAMES))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--fill", action="store_true", help="put the tables into the pages")
    asked = parser.parse_args()
    found = [paper(name) for name in asked.names or NAMES]
    if asked.fill:
        for one in found:
            fill_page(one)
    if asked.json:
        print(json.dumps(as_object(found), indent=1))
    else:
        show(console(), found)


if __name__ == "__main__":
    main()
