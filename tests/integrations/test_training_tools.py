"""Lightning, Fabric, Accelerate and Transformers train with Paceline as with DDP."""

import runpy
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from pair import Ranks

TESTS = Path(__file__).parents[1]
TOOL_CASES = Path(__file__).parent / "programs" / "tools"
EXAMPLES = TESTS.parent / "examples"
pytestmark = pytest.mark.timeout(600)
TOOLS = ("lightning", "fabric", "accelerate", "transformers")
CASES = {  # functions of programs/tools/with_TOOL.py
    "lightning": (
        *("accumulated", "by_hand", "clipped", "compiled", "fitted_again"),
        *("hook_on_cpus", "in_bfloat16", "refused", "resumed_from_a_checkpoint"),
        "with_a_layer_left_out",
    ),
    "fabric": (
        *("accumulated", "in_bfloat16", "refused", "saved_and_loaded", "with_a_layer_left_out"),
    ),
    "accelerate": (
        *("accumulated", "compiled", "for_gpus_where_there_are_none", "hook_of_its_own"),
        *("in_bfloat16", "refused", "saved_and_loaded", "with_a_layer_left_out"),
        *("without_sync_by_hand", "wrapped_once"),
    ),
    "transformers": ("accumulated", "evaluated_before", "refused", "resumed_from_a_checkpoint"),
}


def forget() -> None:
    """Forget the state that Accelerate keeps in its process."""
    if "accelerate" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)


def run_example(path: str) -> tuple[list[float], list[torch.Tensor]]:
    """Run an example on this rank; return its losses and trained weights."""
    forget()
    names = runpy.run_path(path, run_name="__main__")
    model = names["model"]
    losses = names["losses"] if "losses" in names else getattr(model, "losses", [])
    return losses, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("tool", TOOLS)
def test_the_ranks_of_an_example_learn_the_same_model(pair: Ranks, tmp_path: Path, tool):
    """The cases below compare with DDP, and check that each tool uses Paceline."""
    example = str(EXAMPLES / f"train_with_{tool}.py")
    found = pair(run_example, example, group=False, cwd=tmp_path, deadline_s=300)
    (losses, first), (_, second) = found
    assert all(map(torch.equal, first, second))
    assert losses[-1] < 0.9 * losses[0]


def run(tool: str, case: str) -> None:
    """Run a case on this rank."""
    sys.path.insert(0, str(TOOL_CASES))
    module = import_module(f"with_{tool}")
    forget()
    getattr(module, case)()


@pytest.mark.parametrize(("tool", "case"), [(tool, one) for tool in TOOLS for one in CASES[tool]])
def test_a_case_trains_as_with_ddp_or_is_refused(pair: Ranks, tmp_path: Path, tool, case):
    pair(run, tool, case, group=False, cwd=tmp_path, deadline_s=300)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_single_process_trains_as_with_ddp(start, tool):
    path = f"import os, sys; sys.path[:0] = {[str(TOOL_CASES), str(TESTS)]}"
    # At a normal exit, a thread of torch's process group sometimes aborts the process.
    program = f"{path}; from with_{tool} import accumulated; accumulated(); os._exit(0)"
    done = start("-c", program).finish()
    assert done.code == 0, done.err


def test_importing_paceline_imports_no_tool(start):
    imports = "import sys, paceline, paceline.runs.running, paceline.integrations.data_parallel"
    done = start("-c", f"{imports}; print(*sys.modules)", afresh=True).finish()
    assert done.code == 0, done.err
    assert not set(TOOLS) & set(done.out.split())
