"""Programs that the session's ranks run with two wrappers and compare: see ranks/programs."""

import ast
import sys
from pathlib import Path

PROGRAMS = Path(__file__).parent / "ranks" / "programs"


def names_in(folder: Path) -> list[str]:
    """The programs in a folder, without importing anything."""
    return [
        f"{file.stem}.{name}"
        for file in sorted(folder.glob("*.py"))
        if file.stem != "trial"
        for node in ast.parse(file.read_text()).body
        for name in _registered(node)
    ]


def _registered(node: ast.stmt) -> list[str]:
    """The function of `program` or `trains`, or the keys of what `programs` is called with."""
    if isinstance(node, ast.FunctionDef):
        return [node.name] if {"program", "trains"} & set(map(_called, node.decorator_list)) else []
    call = node.value if isinstance(node, ast.Expr) else None
    if isinstance(call, ast.Call) and _called(call) == "programs":
        return [ast.literal_eval(key) for key in call.args[1].keys]
    return []


def _called(one: ast.expr) -> str:
    return ast.unparse(one.func if isinstance(one, ast.Call) else one)


def check(folder: Path, name: str, exchange: str, reference: str) -> None:
    """Fail if a program does not do the same with the exchange as with the reference."""
    sys.path[:0] = [str(folder), str(PROGRAMS)]
    import comparison

    comparison.check(name, exchange, reference)
