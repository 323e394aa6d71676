"""Lightning, Fabric, Accelerate and Transformers train with Paceline as with DDP."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from pair import Ranks
from processes import Finished, Started

# Output of a rare failure in torch's process group on CPUs: while Python exits, a thread that frees
# tensors of the last collective aborts a rank that has already finished.
TORCH_FAILED = "terminate called without an active exception"
ATTEMPTS = 3

TOOL_CASES = Path(__file__).parent / "programs" / "tools"
EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ROUNDING = 1e-5
pytestmark = pytest.mark.timeout(600)
TOOLS = ("lightning", "fabric", "accelerate", "transformers")
# The text in each example that selects Paceline, and the text that replaces it for DDP.
OWN = {
    "lightning": ('strategy=PacelineStrategy(exchange="host")', 'strategy="ddp"'),
    "fabric": ('strategy=PacelineStrategy(exchange="host")', 'strategy="ddp"'),
    "accelerate": ('accelerator = with_paceline(accelerator, exchange="host")\n', ""),
    "transformers": ('trainer = with_paceline(trainer, exchange="host")\n', ""),
}
CASES = {  # functions of programs/tools/with_TOOL.py
    "lightning": (
        *("accumulated", "by_hand", "clipped", "compiled", "encoded", "fitted_again"),
        *("hook_on_cpus", "in_bfloat16", "refused", "resumed_from_a_checkpoint"),
        "with_a_layer_left_out",
    ),
    "fabric": (
        *("accumulated", "in_bfloat16", "refused", "saved_and_loaded", "with_a_layer_left_out"),
    ),
    "accelerate": (
        *("accumulated", "compiled", "for_gpus_where_there_are_none", "hook_of_its_own", "hooks"),
        *("in_bfloat16", "refused", "saved_and_loaded", "with_a_layer_left_out"),
        *("without_sync_by_hand", "wrapped_once"),
    ),
    "transformers": ("accumulated", "evaluated_before", "refused", "resumed_from_a_checkpoint"),
}


def finished(folder: Path, *command: str) -> Finished:
    """Run `python COMMAND` in a folder to its end; repeat a run with TORCH_FAILED."""
    for _ in range(ATTEMPTS):
        started = Started([sys.executable, *command], folder)
        try:
            done = started.finish()
            assert not started.members()
        finally:
            started.kill()
        if done.code == 0 or TORCH_FAILED not in done.err:
            break
    assert done.code == 0, done.err[-5000:]
    return done


@pytest.mark.parametrize("tool", TOOLS)
def test_an_example_trains_as_with_ddp(tmp_path, tool):
    example = str(EXAMPLES / f"train_with_{tool}.py")
    finished(tmp_path, *TORCHRUN, str(TOOL_CASES / "example.py"), example, *OWN[tool])
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)]
    for ours, theirs in ranks:
        assert ours["made"] == ["host"]  # wrapped exactly once
        assert theirs["made"] == []
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4, abs=ROUNDING)
        for one, another in zip(ours["weights"], theirs["weights"], strict=True):
            assert torch.allclose(one, another, rtol=0, atol=1e-4)
    (first, _), (second, _) = ranks
    assert all(map(torch.equal, first["weights"], second["weights"]))
    assert first["losses"][-1] < 0.9 * first["losses"][0]


def run(tool: str, case: str) -> None:
    """Run a case on this rank, and forget the state that Accelerate keeps in its process."""
    sys.path.insert(0, str(TOOL_CASES))
    module = import_module(f"with_{tool}")
    if "accelerate" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
    getattr(module, case)()


@pytest.mark.parametrize(("tool", "case"), [(tool, one) for tool in TOOLS for one in CASES[tool]])
def test_a_case_trains_as_with_ddp_or_is_refused(pair: Ranks, tmp_path: Path, tool, case):
    pair(run, tool, case, group=False, cwd=tmp_path, deadline_s=300)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_single_process_trains_as_with_ddp(tmp_path: Path, tool):
    folders = [str(TOOL_CASES), str(Path(__file__).parents[1])]
    program = f"import sys; sys.path[:0] = {folders}; from with_{tool} import accumulated"
    finished(tmp_path, "-c", f"{program}; accumulated()")


def test_importing_paceline_imports_no_tool(tmp_path: Path):
    imports = "import sys, paceline, paceline.runs.running, paceline.integrations.data_parallel"
    program = f"{imports}; print(*sys.modules)"
    assert not set(TOOLS) & set(finished(tmp_path, "-c", program).out.split())
