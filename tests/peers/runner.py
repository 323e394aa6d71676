"""Run torch's own tests of DistributedDataParallel with Paceline's class in its place.

`python tests/peers/runner.py --exchange host`; exit code 1 if anything is not as expected.py says.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from expected import EXPECTED
from verdict import complaint, table, tests_for

from pair import Outcome, Pair


def main() -> int:
    asked = _arguments()
    if asked.table:
        print(table(), end="")
        return 0
    found = {}
    for exchange in asked.exchange:
        tests = [test for test in tests_for(exchange) if re.search(asked.k, test)]
        found[exchange] = [_told(exchange, outcome) for outcome in _outcomes(exchange, tests)]
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))
    for exchange, results in found.items():
        print(f"{exchange}: {dict(Counter(result['verdict'] for result in results))}")
    return int(any(result["complaint"] for results in found.values() for result in results))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--exchange", action="append", choices=[*EXPECTED], help="ddp: torch's own")
    parser.add_argument("-k", default="", help="only tests whose names match")
    parser.add_argument("--json", type=Path, help="also write the outcomes to this file")
    parser.add_argument("--table", action="store_true", help="only print the README's table")
    asked = parser.parse_args()
    asked.exchange = asked.exchange or [*EXPECTED]
    return asked


def _outcomes(exchange: str, tests: list[str]) -> Iterator[Outcome]:
    """Run tests in one pair of ranks, and in a new one where a test has ended the pair."""
    pair = Pair(exchange)
    try:
        for test in tests:
            if not pair.usable:
                pair = Pair(exchange)
            yield pair.run(test)
    finally:
        pair.close()


def _told(exchange: str, outcome: Outcome) -> dict[str, object]:
    """Print an outcome, and return it with what there is to complain of."""
    wrong = complaint(exchange, outcome)
    verdict = "passed" if outcome.outcome == "passed" else "as expected"
    verdict = "WRONG" if wrong else verdict
    print(f"{outcome.seconds:7.2f} s  {verdict:11}  {outcome.test}", flush=True)
    if wrong:
        print(wrong, flush=True)
    return asdict(outcome) | {"verdict": verdict, "complaint": wrong}


if __name__ == "__main__":
    raise SystemExit(main())
