"""Small faults for src: drawn at random with a fixed seed, found again by what they change.

A mutation is one node of a file's syntax tree that computes something else: a comparison, an
operator, a number, a condition, or a call that is left out. It is named by its file, its function
and its text, so that it can be applied to another version of the file.
"""

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True)
class Mutation:
    """A fault: in the function `scope` of `file`, the `nth` node that reads `before`."""

    file: str
    scope: str
    before: str
    nth: int
    after: str


@dataclass(frozen=True)
class Place:
    """Where a mutation is in a version of its file: the bytes that it replaces, and their lines."""

    mutation: Mutation
    start: int
    end: int
    first_line: int
    last_line: int


def draw(src: Path, number: int, seed: int) -> list[Mutation]:
    """Draw mutations: each time a room of the house, then any of its possible ones."""
    rooms: dict[str, list[Mutation]] = {}
    for path in sorted(src.rglob("*.py")):
        file = path.relative_to(src)
        room = "/".join(file.parts[: 2 if file.parts[0] == "strategies" else 1])
        rooms.setdefault(room, []).extend(one.mutation for one in places(path, str(file)))
    rooms = {room: found for room, found in rooms.items() if found}
    chosen: list[Mutation] = []
    generator = random.Random(seed)  # noqa: S311 - to be drawn again, not to be secret
    while len(chosen) < number:
        found = generator.choice(rooms[generator.choice(sorted(rooms))])
        if found not in chosen:
            chosen.append(found)
    return chosen


def place_of(mutation: Mutation, src: Path) -> Place | None:
    """Find a mutation in a version of the source; None if what it changes is gone."""
    path = src / mutation.file
    found = places(path, mutation.file) if path.exists() else ()
    return next((one for one in found if one.mutation == mutation), None)


def apply(place: Place, path: Path) -> None:
    """Write the mutation into the file."""
    text = path.read_bytes()
    path.write_bytes(
        text[: place.start] + f"({place.mutation.after})".encode() + text[place.end :]
        if place.mutation.after != "pass"
        else text[: place.start] + b"pass" + text[place.end :]
    )


def places(path: Path, file: str) -> Iterator[Place]:
    """Yield all mutations of a file, where they are."""
    text = path.read_text()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    counts: dict[tuple[str, str, str], int] = {}
    for scope, node in _nodes(ast.parse(text), ""):
        after = _mutated(node)
        if after is None:
            continue
        before = ast.unparse(node)
        key = scope, before, after
        counts[key] = counts.get(key, -1) + 1
        yield Place(
            Mutation(file, scope, before, counts[key], after),
            starts[node.lineno - 1] + node.col_offset,
            starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0),
            node.lineno,
            node.end_lineno or node.lineno,
        )


def _nodes(tree: ast.AST, scope: str) -> Iterator[tuple[str, ast.expr | ast.stmt]]:
    """Yield what is computed: no annotation, no default of a field, no message of an error."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.Raise | ast.Assert | ast.JoinedStr | ast.arguments):
            continue
        inner = scope
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = f"{scope}.{child.name}".lstrip(".")
        elif isinstance(child, ast.AnnAssign):
            if child.value is not None:
                yield from _nodes(ast.Expression(child.value), scope)
            continue
        if isinstance(child, ast.expr | ast.stmt) and scope:
            yield scope, child
        yield from _nodes(child, inner)


def _mutated(node: ast.AST) -> str | None:
    """Return the source of a node that computes something else, or None."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPPED:
        swapped = SWAPPED[type(node.ops[0])]()
        return ast.unparse(ast.Compare(node.left, [swapped], node.comparators))  # type: ignore[list-item]
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
        swapped = SWAPPED[type(node.op)]()
        if any(
            isinstance(one, ast.Constant | ast.JoinedStr)
            and isinstance(getattr(one, "value", ""), str)
            for one in (node.left, node.right)
        ):
            return None
        return ast.unparse(ast.BinOp(node.left, swapped, node.right))  # type: ignore[arg-type]
    if isinstance(node, ast.BoolOp):
        return ast.unparse(ast.BoolOp(SWAPPED[type(node.op)](), node.values))  # type: ignore[arg-type]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ast.unparse(node.operand)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return ast.unparse(ast.Constant(node.value + 1))
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return str(not node.value)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return "pass"
    if isinstance(node, ast.IfExp):
        return ast.unparse(ast.IfExp(node.test, node.orelse, node.body))
    return None
