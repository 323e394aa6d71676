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
        if file.stem not in ("trial", "declared", "steps", "comparison")
        for node in ast.parse(file.read_text()).body
        for name in _programs(node)
    ]


def _programs(node: ast.stmt) -> list[str]:
    """A public function of a trial, or what `programs` is called with."""
    if isinstance(node, ast.FunctionDef):
        arguments = [one.arg for one in node.args.args]
        return [node.name] if node.name[0] != "_" and "trial" in arguments[:1] else []
    call = node.value if isinstance(node, ast.Expr) else None
    if isinstance(call, ast.Call) and ast.unparse(call.func) == "programs":
        return [ast.literal_eval(key) for key in call.args[1].keys]
    return []


def check(folder: Path, name: str, exchange: str, reference: str) -> None:
    """Fail if a program does not do the same with the exchange as with the reference."""
    sys.path[:0] = [str(folder), str(PROGRAMS)]
    import comparison

    comparison.check(name, exchange, reference)
