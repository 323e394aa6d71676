"""Select torch's tests of DistributedDataParallel by their code.

A test is selected if it uses the class, or a method of the test class that does.
"""

import ast
import importlib.util
from functools import cache
from pathlib import Path

MODULE = "torch.testing._internal.distributed.distributed_test"
# A further test, in rank.py: `test_ddp_uneven_inputs` fails early with exchanges without hooks.
WITHOUT_HOOKS = "test_ddp_uneven_inputs_without_hooks"
_SUBJECT = "DistributedDataParallel"


@cache
def ddp_tests() -> tuple[str, ...]:
    """Return the names of the tests, in the order of the file."""
    methods = _methods()
    names = {name: _names_in(method) for name, method in methods.items()}
    using: set[str] = set()
    more = {name for name, used in names.items() if _SUBJECT in used}
    while more:
        using |= more
        more = {name for name, used in names.items() if used & using} - using
    return tuple(name for name in methods if name in using and name.startswith("test"))


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
