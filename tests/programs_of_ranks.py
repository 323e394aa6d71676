"""Programs that the session's ranks run with two wrappers and compare: see ranks/programs."""

import ast
import sys
from pathlib import Path

PROGRAMS = Path(__file__).parent / "ranks" / "programs"


def names_in(folder: Path) -> list[str]:
    """The programs in a folder, without importing anything."""
    return [
        f"{file.stem}.{node.name}"
        for file in sorted(folder.glob("*.py"))
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and any(map(_registers, node.decorator_list))
    ]


def _registers(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(called, ast.Name) and called.id == "program"


def check(folder: Path, name: str, exchange: str, reference: str) -> None:
    """Fail if a program does not do the same with the exchange as with the reference."""
    sys.path[:0] = [str(folder), str(PROGRAMS)]
    import comparison

    comparison.check(name, exchange, reference)
