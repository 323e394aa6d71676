"""Print the tables of the five papers with the planner's values.

    python benchmarks/papers/main.py [cgdp] [wheel] [dgx1] [hogbatch] [dettmers8bit] [--fill]

Without a name, all papers are printed. --fill also writes the tables into the papers' pages.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from papers import NAMES, paper
from papers.paper_tables import fill_page, headlines, markdown


def main() -> None:
    """Print the tables, and the errors of the predicted cells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="paper", help=", ".join(NAMES))
    parser.add_argument("--fill", action="store_true", help="put the tables into the pages")
    asked = parser.parse_args()
    found = [paper(name) for name in asked.names or NAMES]
    for one in found:
        print(f"# {one.name}\n\n{markdown(one)}\n")
        if asked.fill:
            fill_page(one)
    print(headlines(found))


if __name__ == "__main__":
    main()
