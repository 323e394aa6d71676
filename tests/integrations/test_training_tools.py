"""Lightning, Fabric, Accelerate and Transformers with Paceline, beside themselves with DDP."""

import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from launched import LAUNCH, succeeded
from paceline.core.errors import InvalidInput
from processes import ENDING_S, Finished, Started, is_running

PROGRAMS = Path(__file__).parent / "programs" / "tools"
EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
FORKED = ["-c", LAUNCH, "2"]
ROUNDING = 1e-5
pytestmark = pytest.mark.timeout(600)
TOOLS = ("lightning", "fabric", "accelerate", "transformers")
# Of each example, the text that makes it Paceline's, and what makes it the tool's own.
OWN = {
    "lightning": ('strategy=PacelineStrategy(exchange="host")', 'strategy="ddp"'),
    "fabric": ('strategy=PacelineStrategy(exchange="host")', 'strategy="ddp"'),
    "accelerate": ('accelerator = with_paceline(accelerator, exchange="host")\n', ""),
    "transformers": ('trainer = with_paceline(trainer, exchange="host")\n', ""),
}
# What is trained beside DDP, and in how many steps.
STEPS = {
    ("lightning", "accumulated"): 4,
    ("lightning", "clipped"): 8,
    ("lightning", "compiled"): 8,
    ("lightning", "in_bfloat16"): 8,
    ("lightning", "with_a_layer_left_out"): 8,
    ("fabric", "accumulated"): 4,
    ("fabric", "in_bfloat16"): 8,
    ("fabric", "with_a_layer_left_out"): 8,
    ("accelerate", "plain"): 8,
    ("accelerate", "accumulated"): 4,
    ("accelerate", "in_bfloat16"): 8,
    ("accelerate", "with_a_layer_left_out"): 8,
    ("transformers", "plain"): 6,
    ("transformers", "accumulated"): 6,
    ("transformers", "in_bfloat16"): 6,
}

Found = dict[str, dict[int, Any]]  # of each case what came of it, by rank


def finished(folder: Path, *command: str) -> Finished:
    """Run Python on this command line in a folder, to its end; no process may be left there."""
    return succeeded(lambda: _finished(folder, *command))


def _finished(folder: Path, *command: str) -> Finished:
    started = Started([sys.executable, *command], folder)
    try:
        done = started.finish(240)
        assert not left_in(folder)
    finally:
        if running_in(folder):
            started.process.terminate()  # torchrun ends its ranks, which lead groups themselves
            started.process.communicate()
        started.kill()
    return done


def running_in(folder: Path) -> list[int]:
    """The processes that work in a folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            if place.readlink() == folder and is_running(int(place.parent.name)):
                found.append(int(place.parent.name))
    return found


def left_in(folder: Path) -> list[int]:
    """The processes that still work in a folder when the kernel had time to end those killed."""
    until = time.monotonic() + ENDING_S
    while (found := running_in(folder)) and time.monotonic() < until:
        time.sleep(0.01)
    return found


def found_by(folder: Path, *command: str) -> Found:
    found: Found = {}
    lines = finished(folder, *command).out.splitlines()
    for name, rank, outcome in (json.loads(line) for line in lines if line.startswith('["')):
        found.setdefault(name, {})[rank] = outcome
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return what came of a tool's cases; each tool is run once."""
    known: dict[str, Found] = {}

    def of(tool: str) -> Found:
        if tool not in known:
            folder = tmp_path_factory.mktemp(tool)
            program = str(PROGRAMS / f"with_{tool}.py")
            known[tool] = found_by(folder, *FORKED, program)
        return known[tool]

    return of


def both(outcomes: dict[int, Any]) -> list[Any]:
    """Return what came of a case on both ranks, on which nothing was raised."""
    rows = [outcomes[rank] for rank in (0, 1)]
    assert not [row["error"] for row in rows if "error" in row]
    return rows


@pytest.mark.parametrize("tool", TOOLS)
def test_an_example_that_lost_or_doubled_a_gradient_would_not_train_as_with_ddp(tmp_path, tool):
    example = str(EXAMPLES / f"train_with_{tool}.py")
    # Lightning asks whether torchrun has started it; for the others a rank is a rank.
    ranks_of = TORCHRUN if tool == "lightning" else FORKED
    finished(tmp_path, *ranks_of, str(PROGRAMS / "example.py"), example, *OWN[tool])
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)]
    for ours, theirs in ranks:
        assert ours["made"] == ["host"]  # exactly one
        assert theirs["made"] == []
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4, abs=ROUNDING)
        for one, another in zip(ours["weights"], theirs["weights"], strict=True):
            assert torch.allclose(one, another, rtol=0, atol=1e-4)
    (first, _), (second, _) = ranks
    assert all(map(torch.equal, first["weights"], second["weights"]))
    assert first["losses"][-1] < 0.9 * first["losses"][0]


@pytest.mark.parametrize(("tool", "case"), STEPS)
def test_no_sync_that_is_ignored_or_a_second_wrapper_changes_steps(found, tool: str, case: str):
    for row in both(found(tool)[case]):
        assert row["worst"] <= ROUNDING
        assert (row["wraps"], row["exchange"]) == (["DataParallel"], "host")
        assert row["exchanges"] == STEPS[tool, case]
        assert row.get("norms", 0.0) <= ROUNDING
        assert row.get("loss", 0.0) <= ROUNDING


EXACT, MOVED = (0.0, ROUNDING), (100 * ROUNDING, float("inf"))
# What comes of other cases on both ranks, or on the first: values, and ranges of numbers.
CASES: dict[tuple[str, str], dict[str, Any]] = {
    ("lightning", "by_name"): {"worst": EXACT, "wraps": ["DataParallel"]},
    ("fabric", "by_name"): {"worst": EXACT, "wraps": ["DataParallel"]},
    ("lightning", "encoded"): {"apart": (ROUNDING, 0.5)},  # in 8 bits
    # DDP leaves the hook out on CPUs.
    ("lightning", "hook_on_cpus"): {"worst": EXACT, "calls": 8, "wraps": [True]},
    ("lightning", "by_hand"): {"worst": EXACT, "exchanges": 16},  # two losses a step
    ("lightning", "resumed_from_a_checkpoint"): {
        "prefixed": [],
        "moved": MOVED,
        "worst": EXACT,
        "loaded": EXACT,
    },
    # Neither threads nor memory are left after training.
    ("lightning", "fitted_again"): {
        "left": ["none", "none"],
        "worst": EXACT,
        "wraps": ["DataParallel"],
    },
    ("fabric", "saved_and_loaded"): {"moved": MOVED, "worst": EXACT, "loaded": EXACT},
    # Its prefix is that of DDP.
    ("accelerate", "saved_and_loaded"): {"prefixes": ["module"], "moved": MOVED, "worst": EXACT},
    ("accelerate", "compiled"): {
        "wraps": ["DataParallel"],
        "compiled": ["OptimizedModule", "Net"],
        "worst": EXACT,
    },
    ("accelerate", "hooks"): {
        "worst": EXACT,
        "calls": 8,
        "apart": (ROUNDING, 0.05),  # in 8 bits
        "bytes": (1, float("inf")),
    },
    ("accelerate", "hook_of_its_own"): {"apart": (1e-7, 1e-2)},  # in 16 bits
    ("accelerate", "without_sync_by_hand"): {"own": True, "both": True},
    # Each model once, also for save_state; and none that is not to be trained.
    ("accelerate", "wrapped_once"): {
        "wraps": [["DataParallel"]] * 5,
        "same": [True] * 4,
        "known": 5,
        "not for training": [[], []],
        "evaluated before": ["DataParallel"],
        "by torch": ["DistributedDataParallel"],  # an accelerator without Paceline
    },
    # After an evaluation.
    ("transformers", "evaluated_before"): {
        "wraps": ["DataParallel"],
        "again": ["DataParallel"],
        "worst": EXACT,
    },
    ("transformers", "resumed_from_a_checkpoint"): {"moved": MOVED, "worst": EXACT},
}
OF_THE_FIRST_RANK = {("fabric", "saved_and_loaded"), ("accelerate", "saved_and_loaded")}


@pytest.mark.parametrize(("tool", "case"), CASES)
def test_a_tool_that_trains_otherwise_than_it_says_is_noticed(found, tool: str, case: str):
    rows = both(found(tool)[case])
    for row in rows[:1] if (tool, case) in OF_THE_FIRST_RANK else rows:
        for name, expected in CASES[tool, case].items():
            if isinstance(expected, tuple):
                assert expected[0] <= row[name] <= expected[1], name
            else:
                assert row[name] == expected, name


REFUSED = {  # fields
    "lightning": [
        *["ddp_comm_hook"] * 4,
        *("model_averaging_period", "precision", "exchange"),
    ],
    "fabric": ["model", "precision"],
    "accelerate": [
        *("comm_hook", "find_unused_parameters", "model", "register_comm_hook", "accelerator"),
        *("accelerator", "mixed_precision"),
    ],
    "transformers": ["trainer", "trainer", "find_unused_parameters"],
}


def field_of(said: str) -> str:
    kind, _, message = said.partition(": ")
    assert kind == "InvalidInput"
    return InvalidInput.of(message).field


@pytest.mark.parametrize("tool", TOOLS)
def test_what_cannot_be_done_and_would_be_ignored_is_refused_in_one_line(found, tool: str):
    for row in both(found(tool)["refused"]):
        assert list(map(field_of, row["said"])) == REFUSED[tool]


def test_accelerate_that_trains_each_rank_by_itself_for_want_of_gpus_is_refused(found):
    for row in both(found("accelerate")["for_gpus_where_there_are_none"]):
        [said] = row["said"]
        assert field_of(said) == "accelerator"


@pytest.mark.parametrize("tool", TOOLS)
def test_a_process_that_is_alone_would_wait_for_others_or_train_otherwise(tmp_path: Path, tool):
    found = found_by(tmp_path, str(PROGRAMS / f"with_{tool}.py"), "accumulated")
    assert found["accumulated"][0].get("worst", found) <= ROUNDING


def test_importing_paceline_that_imports_a_tool_would_need_it(tmp_path: Path):
    imports = "import sys, paceline, paceline.runs.running, paceline.integrations.data_parallel"
    program = f"{imports}; print(*sys.modules)"
    assert not set(TOOLS) & set(finished(tmp_path, "-c", program).out.split())
