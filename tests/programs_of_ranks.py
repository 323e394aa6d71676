"""Programs (in ranks/programs) that ranks run with two wrappers to compare the results."""

import ast
import sys
from pathlib import Path

PROGRAMS = Path(__file__).parent / "ranks" / "programs"


def names_in(folder: Path) -> list[str]:
    """Return the names of the programs in a folder, without importing them."""
    return [
        f"{file.stem}.{name}"
        for file in sorted(folder.glob("*.py"))
        if file.stem not in ("trial", "declared", "steps", "comparison")
        for node in ast.parse(file.read_text()).body
        for name in _programs(node)
    ]


def _programs(node: ast.stmt) -> list[str]:
    """Return a public function of a trial, or the names in a call of `programs`."""
    if isinstance(node, ast.FunctionDef):
        arguments = [one.arg for one in node.args.args]
        return [node.name] if node.name[0] != "_" and "trial" in arguments[:1] else []
    call = node.value if isinstance(node, ast.Expr) else None
    if isinstance(call, ast.Call) and ast.unparse(call.func) == "programs":
        return [ast.literal_eval(key) for key in call.args[1].keys]
    return []


def check(folder: Path, name: str, exchange: str, reference: str) -> None:
    """Fail if a program's results with an exchange and the reference differ."""
    sys.path[:0] = [str(folder), str(PROGRAMS)]
    import comparison

    comparison.check(name, exchange, reference)
