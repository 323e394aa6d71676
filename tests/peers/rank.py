"""Run one of torch's tests on this rank of a pair, and return its outcome."""

import linecache
import os
import time
import traceback
import unittest
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch.distributed as dist
from on_cpu import MODULE, NUM_RANKS, imported
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from pair import joined

# The timeout of collectives, as in torch's runs of these tests.
DEADLINE = timedelta(seconds=60)


class _OnCpu:
    """Drops the arguments for GPUs, which must be missing for modules on the CPU."""

    exchange: ClassVar[dict[str, str]] = {}

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_ids", None)
        kwargs.pop("output_device", None)
        super().__init__(module, *args, **kwargs, **self.exchange)


def _class(name: str, base: type[nn.Module], **exchange: str) -> type[nn.Module]:
    return type(name, (_OnCpu, base), {"exchange": exchange, "__module__": __name__})


# Classes that replace DistributedDataParallel: itself, or Paceline's with an exchange. Each is a
# separate class of this module, because unpickling looks up a model's class by name.
Torch = _class("Torch", DistributedDataParallel)
Auto, AllReduce, Tree, Host = (
    _class(name, paceline.DataParallel, exchange=name.lower())
    for name in ("Auto", "AllReduce", "Tree", "Host")
)
STAND_INS: dict[str, type[nn.Module]] = {"ddp": Torch}
STAND_INS |= {"auto": Auto, "allreduce": AllReduce, "tree": Tree, "host": Host}


@cache
def _case(stand_in: str) -> type[unittest.TestCase]:
    """Return torch's tests, with the methods of the class that usually starts their processes."""
    os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"
    suite: Any = imported(STAND_INS[stand_in])
    from torch.testing._internal.common_utils import TestCase, set_rng_seed

    class Case(suite.DistributedTest._DistTestBase, TestCase):
        rank: int
        world_size = NUM_RANKS

        def run_here(self, test: str, rank: int) -> None:
            self.rank, suite.Barrier.barrier_id = rank, 0
            set_rng_seed()
            getattr(self, test)()

        def test_ddp_uneven_inputs_without_hooks(self) -> None:
            """Run torch's test without its communication hooks."""
            made = suite.DDPUnevenTestInput
            without = mock.patch.object(
                suite, made.__name__, lambda **given: made(**(given | {"hook": None}))
            )
            with without:
                self.test_ddp_uneven_inputs()

        def _barrier(self, *_: object, **__: object) -> None:
            suite.Barrier.sync(timeout=DEADLINE.seconds)

    return Case


def prepared(stand_in: str) -> None:
    """Import the tests before their deadlines start, because it takes long."""
    _case(stand_in)


def outcome(stand_in: str, test: str, folder: Path) -> dict[str, Any]:
    """Run one test in its own process group; return the outcome on this rank."""
    case: Any = _case(stand_in)
    rank = int(os.environ["RANK"])
    os.environ |= {"BACKEND": "gloo", "TEMP_DIR": str(folder)}
    os.environ.pop("LOCAL_RANK", None)  # torch would choose a GPU by it
    dist.set_debug_level_from_env()
    store = dist.FileStore(str(folder / "store"), NUM_RANKS)
    try:
        joined(store, DEADLINE.seconds)
        case(test).run_here(test, rank)
    except (unittest.SkipTest, SystemExit) as left:
        return {"outcome": "skipped", "error": str(left)}
    except Exception as error:  # any error of a test is its outcome
        return {
            "outcome": "raised",
            "error": "".join(traceback.format_exception_only(error)).strip(),
            "statements": _statements(error),
            "details": traceback.format_exc(),
            "at_s": time.monotonic(),
        }
    return {"outcome": "passed"}


def _statements(error: Exception) -> str:
    """Return the statements of torch's tests in a traceback, outermost first, one per line."""
    found = []
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename).stem == MODULE.rpartition(".")[2]:
            lines = linecache.getlines(frame.filename)[frame.lineno - 1 : frame.end_lineno]
            found.append(" ".join("".join(lines).split()))
    return "\n".join(found)
