"""Run torch's tests of DistributedDataParallel with Paceline's class on two ranks.

They catch wrong values, lost calls, errors that differ from DDP's, crashes and hangs. Of the tests
that pass with torch's class, exactly those of expected.py must fail.
"""

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from expected import EXPECTED
from on_cpu import MODULE

import rank
from pair import RankFailed, Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
# The number of tests that pass with torch's class on two CPU ranks; fewer means lost coverage.
NUM_REFERENCE = 77
START_S = 240.0  # deadline for importing torch's tests on a busy machine
TEST_S = 140.0  # deadline of a test, longer than the timeouts of two collectives
# From best to worst; the outcome of a pair is that of its worst rank.
WORDS = ("passed", "skipped", "raised", "hung or crashed")
# One rank waits a minute for another in vain. torch does not run this test either.
NEVER_RUN = "test_ddp_has_finalized"
# A further test, in rank.py: `test_ddp_uneven_inputs` fails early with exchanges without hooks.
WITHOUT_HOOKS = "test_ddp_uneven_inputs_without_hooks"


def ddp_tests() -> list[str]:
    """Return the tests that use DDP, or a method of the test class that does, in file order."""
    methods = _methods()
    names = {name: _names_in(method) for name, method in methods.items()}
    using: set[str] = set()
    more = {name for name, used in names.items() if "DistributedDataParallel" in used}
    while more:
        using |= more
        more = {name for name, used in names.items() if used & using} - using
    return [name for name in methods if name in using and name.startswith("test")]


def _methods() -> dict[str, ast.FunctionDef]:
    """Parse the methods of torch's test class; importing the module would take long."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    path = Path(torch.origin).parent.joinpath(*MODULE.split(".")[1:]).with_suffix(".py")
    found: ast.AST = ast.parse(path.read_text())
    for name in ("DistributedTest", "_DistTestBase"):
        found = next(n for n in found.body if isinstance(n, ast.ClassDef) and n.name == name)
    return {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}


def _names_in(method: ast.FunctionDef) -> set[str]:
    nodes = list(ast.walk(method))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def outcome_of(pair: Ranks, stand_in: str, test: str, folder: Path) -> dict[str, Any]:
    """Run a test on the ranks; after a crash or hang, the next call starts new ranks."""
    pair(rank.prepared, stand_in, group=False, deadline_s=START_S)
    (folder / "barrier").mkdir(parents=True)  # torch's tests expect it
    try:
        found = pair(rank.outcome, stand_in, test, folder, group=False, deadline_s=TEST_S)
    except RankFailed as failed:
        return {"outcome": WORDS[-1], "details": str(failed)}
    # If both ranks raised, report the first error, which may have caused the second.
    return max(found, key=lambda one: (WORDS.index(one["outcome"]), -one.get("at_s", 0.0)))


def outcomes_of(stand_in: str, tests: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    """Run tests on a pair of ranks."""
    pair = Ranks(2)
    try:
        return {test: outcome_of(pair, stand_in, test, folder / test) for test in tests}
    finally:
        pair.close()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the tests that pass with torch's class; the others need GPUs, NCCL or pickles."""
    tests = [test for test in [*ddp_tests(), WITHOUT_HOOKS] if test != NEVER_RUN]
    found = outcomes_of("ddp", tests, tmp_path_factory.mktemp("ddp"))
    passed = [test for test, one in found.items() if one["outcome"] == WORDS[0]]
    assert len(passed) >= NUM_REFERENCE
    return passed


def is_expected(exchange: str, test: str, outcome: dict[str, Any]) -> bool:
    """Return whether a test ends as expected.py says, by default without an error."""
    part = EXPECTED[exchange].get(test)
    if outcome["outcome"] != "raised" or part is None:
        return part is None and outcome["outcome"] == WORDS[0]
    return part in outcome["error"] or part in outcome["statements"]


@pytest.mark.parametrize("exchange", EXPECTED)
def test_torchs_tests_pass_or_end_as_expected(
    reference: list[str], exchange: str, tmp_path: Path
) -> None:
    outcomes = outcomes_of(exchange, reference, tmp_path)
    wrong = {test: one for test, one in outcomes.items() if not is_expected(exchange, test, one)}
    assert not wrong, "\n".join(
        f"{test} {one['outcome']}: {one.get('error', '')}\n{one.get('details', '')}"
        for test, one in wrong.items()
    )
    assert EXPECTED[exchange].keys() <= outcomes.keys()
