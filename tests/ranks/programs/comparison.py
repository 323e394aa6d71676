"""Run a program with two wrappers, one after the other, and report differences beyond rounding.

Each run has its own process group, so that one cannot affect the other.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from declared import find
from torch import Tensor
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from pair import joined, leave
from trial import Program, Raised, Trial, observe

TOLERANCE = {
    torch.float64: 1e-11,
    torch.complex128: 1e-11,
    torch.float32: 2e-6,
    torch.complex64: 2e-6,
    torch.bfloat16: 2e-2,
    torch.float16: 2e-3,
}
MOST = 6  # differences reported of one run
_references: dict[tuple[str, str], list[Any]] = {}  # observations of the last program


def check(name: str, exchange: str, reference: str) -> None:
    """Run a program with both wrappers and compare them; cache the reference's observations."""
    program = find(name)
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=program.deadline_s)))
    kind = "alone" if exchange in program.exact_by else reference
    if (name, kind) not in _references:
        _references.clear()
        _references[name, kind] = _seen(program, kind, store)
    expected = _references[name, kind]
    found = unexpected(program, expected) if kind == reference else []
    if not found:
        ours = _seen(program, exchange, store)
        found = differences(program, exchange, expected, ours)
        if found and isinstance(ours[-1], Raised):
            found.append(ours[-1].frames)
    assert not found, "\n".join(found)


def _seen(program: Program, kind: str, store: Store) -> list[Any]:
    """Run a program with a wrapper, and return its observations."""
    torch.set_default_dtype(torch.float64)
    joined(dist.PrefixStore(kind, store), program.wait_s)
    seen = observe(program, Trial(dist.get_rank(), dist.get_world_size(), kind, program.wait_s))
    leave()
    torch.set_default_dtype(torch.float32)
    return seen


def unexpected(program: Program, expected: list[Any]) -> list[str]:
    """Return a difference if the reference does not end as `program.raises` declares."""
    last = expected[-1]
    family = last.family if isinstance(last, Raised) else ""
    if family == program.raises:
        return []
    return [f"{_short(last)}, not {program.raises or 'nothing'}"]


def differences(program: Program, exchange: str, expected: list[Any], ours: list[Any]) -> list[str]:
    """Return all differences from the reference."""
    if exchange in program.refused_by:
        return _refusal(program, ours)
    found: list[str] = []
    for step, (one, other) in enumerate(zip(expected, ours, strict=False)):
        if isinstance(one, Raised) and program.better:
            return found[:MOST]
        found += _apart(one, other, f"step {step}")
    if len(expected) != len(ours) and not found:
        found.append(f"{len(ours)} steps, not {len(expected)}")
    return found[:MOST]


def _refusal(program: Program, ours: list[Any]) -> list[str]:
    last = ours[-1]
    if isinstance(last, Raised) and "InvalidInput" in last.classes and program.refusal in last.text:
        return []
    return [f"{_short(last)}, not InvalidInput that says {program.refusal!r}"]


def _apart(one: Any, other: Any, where: str) -> list[str]:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _tensors_apart(one, other, where)
    if isinstance(one, dict) and isinstance(other, dict):
        return _dicts_apart(one, other, where)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [text for i, pair in pairs for text in _apart(*pair, f"{where}[{i}]")]
    both_raised = isinstance(one, Raised) and isinstance(other, Raised)
    if one.family in other.classes if both_raised else one == other:
        return []
    return [f"{where}: {_short(other)}, not {_short(one)}"]


def _dicts_apart(one: dict[Any, Any], other: dict[Any, Any], where: str) -> list[str]:
    if list(one) != list(other):
        missing = [key for key in one if key not in other]
        more = [key for key in other if key not in one]
        return [f"{where}: without {missing}, with {more}, in the order {list(other)[:5]}"]
    return [text for key in one for text in _apart(one[key], other[key], f"{where}: {key}")]


def _tensors_apart(one: Tensor, other: Tensor, where: str) -> list[str]:
    kinds = [(t.dtype, tuple(t.shape), t.layout) for t in (one, other)]
    if kinds[0] != kinds[1]:
        return [f"{where}: {kinds[1]}, not {kinds[0]}"]
    if one.is_sparse:
        one, other = one.to_dense(), other.to_dense()
    if one.numel() == 0 or torch.equal(one, other):
        return []
    tolerance = TOLERANCE.get(one.dtype, 0.0)
    finite = one[one.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    if torch.allclose(
        other, one, rtol=tolerance, atol=tolerance * max(largest, 1e-6), equal_nan=True
    ):
        return []
    return [f"{where}: {_values(other)}, not {_values(one)}"]


def _values(tensor: Tensor) -> str:
    return f"{[round(value, 6) for value in tensor.flatten()[:3].tolist()]}..."


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return _values(value) if value.is_floating_point() else str(value.flatten()[:3])
    if isinstance(value, dict) and "yielded" in value:
        return "went on"
    return str(value)[:200]
