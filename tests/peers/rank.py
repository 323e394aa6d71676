"""One rank: runs the tests that it is told, one after the other, and says what came of each.

`python rank.py RANK STAND_IN`; a line of JSON on stdin is one test, the line on stdout its outcome.
"""

import faulthandler
import gc
import json
import linecache
import os
import signal
import sys
import traceback
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from listed import MODULE
from on_cpu import NUM_RANKS, imported
from stand_ins import STAND_INS

# The longest that a collective waits, as in torch's own runs of these tests.
DEADLINE = timedelta(seconds=60)


def main() -> None:
    rank, stand_in = int(sys.argv[1]), sys.argv[2]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what tests print is not an answer
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    case = _case(imported(STAND_INS[stand_in]))
    gc.freeze()  # what is imported by now stays, and need not be looked through after each test
    environment = dict(os.environ)
    print(json.dumps({"outcome": "passed"}), file=answers, flush=True)  # imported, and ready
    for line in sys.stdin:
        _clear(environment)  # both ranks have answered by now: nothing is waited for any more
        told = json.loads(line)
        outcome = _outcome(case, told["test"], rank, Path(told["folder"]))
        print(json.dumps(outcome), file=answers, flush=True)
        if outcome["outcome"] != "passed":
            _clear(environment)  # closes connections: the other rank need not wait for this one


def _case(suite: Any) -> type[unittest.TestCase]:
    """Return torch's tests, with what they ask of the class that usually starts their processes."""
    from torch.testing._internal.common_utils import TestCase, set_rng_seed

    class Case(suite.DistributedTest._DistTestBase, TestCase):
        rank: int
        world_size = NUM_RANKS

        def run_here(self, test: str, rank: int) -> None:
            self.rank, suite.Barrier.barrier_id = rank, 0
            set_rng_seed()
            getattr(self, test)()

        def test_ddp_uneven_inputs_without_hooks(self) -> None:
            """All of torch's test but its communication hooks, at which it ends where none are."""
            made = suite.DDPUnevenTestInput
            without = mock.patch.object(
                suite, made.__name__, lambda **given: made(**(given | {"hook": None}))
            )
            with without:
                self.test_ddp_uneven_inputs()

        def _barrier(self, *_: object, **__: object) -> None:
            suite.Barrier.sync(timeout=DEADLINE.seconds)

    return Case


def _outcome(case: Any, test: str, rank: int, folder: Path) -> dict[str, str]:
    """Run one test in a process group of its own; return what came of it on this rank."""
    os.environ["TEMP_DIR"] = str(folder)
    store = dist.FileStore(str(folder / "store"), NUM_RANKS)
    try:
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=DEADLINE
        )
        # A rank that leaves at once would break a connection that another one still makes.
        store.set(f"joined/{rank}", "")
        store.wait([f"joined/{other}" for other in range(NUM_RANKS)])
        case(test).run_here(test, rank)
    except (unittest.SkipTest, SystemExit) as left:
        return {"outcome": "skipped", "error": str(left)}
    except Exception as error:  # whatever a test raises is its outcome
        return {
            "outcome": "raised",
            "error": "".join(traceback.format_exception_only(error)).strip(),
            "statements": _statements(error),
            "traceback": traceback.format_exc(),
        }
    return {"outcome": "passed", "error": ""}


def _statements(error: Exception) -> str:
    """Return where in torch's tests an error came out, from the outside in, a line each."""
    found = []
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename).stem == MODULE.rpartition(".")[2]:
            lines = linecache.getlines(frame.filename)[frame.lineno - 1 : frame.end_lineno]
            found.append(" ".join("".join(lines).split()))
    return "\n".join(found)


def _clear(environment: dict[str, str]) -> None:
    """Leave nothing of a test to the next: models, process groups, levels of debugging."""
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)
    dist.set_debug_level_from_env()


if __name__ == "__main__":
    main()
