"""Run torch's tests of DistributedDataParallel with Paceline's class.

`python tests/peers/runner.py --exchange host`; exit code 1 if an outcome differs from expected.py.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from expected import EXPECTED
from verdict import WORDS, Outcome, complaint, tests_for

import rank
from pair import RankFailed, Ranks

START_S = 240.0  # deadline for importing torch's tests on a busy machine
TEST_S = 140.0  # deadline of a test, longer than the timeouts of two collectives


def main() -> int:
    asked = _arguments()
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
    asked = parser.parse_args()
    asked.exchange = asked.exchange or [*EXPECTED]
    return asked


def _outcomes(exchange: str, tests: list[str]) -> Iterator[Outcome]:
    """Run tests on one pair of ranks, and on a new pair after a crash or hang."""
    pair = Ranks(2)
    try:
        for test in tests:
            yield _outcome(pair, exchange, test)
    finally:
        pair.close()


def _outcome(pair: Ranks, exchange: str, test: str) -> Outcome:
    pair(rank.prepared, exchange, group=False, deadline_s=START_S)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "barrier").mkdir()  # torch's tests expect it
        asked = (rank.outcome, exchange, test, Path(folder))
        try:
            said = pair(*asked, group=False, deadline_s=TEST_S)
        except RankFailed as failed:
            return Outcome(test, WORDS[-1], details=str(failed))
    # If both ranks raised, report the first error, which may have caused the second.
    worst = max(said, key=lambda one: (WORDS.index(one["outcome"]), -one.pop("at_s", 0.0)))
    return Outcome(test, **worst, seconds=round(time.monotonic() - started, 3))


def _told(exchange: str, outcome: Outcome) -> dict[str, object]:
    """Print an outcome; return it with its verdict and complaint."""
    wrong = complaint(exchange, outcome)
    verdict = "passed" if outcome.outcome == "passed" else "as expected"
    verdict = "WRONG" if wrong else verdict
    print(f"{outcome.seconds:7.2f} s  {verdict:11}  {outcome.test}", flush=True)
    if wrong:
        print(wrong, flush=True)
    return asdict(outcome) | {"verdict": verdict, "complaint": wrong}


if __name__ == "__main__":
    raise SystemExit(main())
