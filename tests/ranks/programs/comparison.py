"""Run a program with two wrappers, one after the other, and report differences beyond rounding.

Each run has its own process group, so that one cannot affect the other.
"""

import gc
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from declared import find
from torch import Tensor
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from pair import joined
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
_groups: list[Any] = []  # a callback in gloo's thread must not release the last reference


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
        found += [_traceback(ours)] if found else []
    assert not found, "\n".join(found)


def _seen(program: Program, kind: str, store: Store) -> list[Any]:
    """Run a program with a wrapper, and return its observations."""
    torch.set_default_dtype(torch.float64)
    joined(dist.PrefixStore(kind, store), program.wait_s)
    seen = observe(program, Trial(dist.get_rank(), dist.get_world_size(), kind, program.wait_s))
    _groups[:] = [dist.group.WORLD]
    gc.collect()  # delete models, and so their threads
    gc.freeze()  # later collections skip the remaining objects
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.set_default_dtype(torch.float32)
    return seen


def _traceback(seen: list[Any]) -> str:
    """Return the frames of the program's last error, without those of installed packages."""
    if not (seen and isinstance(seen[-1], Exception)):
        return ""
    frames = traceback.extract_tb(seen[-1].__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename]
    return "; ".join(f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in own[-6:])


def unexpected(program: Program, expected: list[Any]) -> list[str]:
    """Return a difference if the reference does not end as `program.raises` declares."""
    last = expected[-1] if expected else None
    raised = Raised.of(last) if isinstance(last, Exception) else None
    if (raised.family if raised else "") == program.raises:
        return []
    return [f"raised {raised}, not {program.raises or 'nothing'}"]


def differences(program: Program, exchange: str, expected: list[Any], ours: list[Any]) -> list[str]:
    """Return all differences from the reference."""
    if exchange in program.refused_by:
        return _refusal(program, ours)
    found: list[str] = []
    for step, (one, other) in enumerate(zip(expected, ours, strict=False)):
        if isinstance(one, Exception) and program.better:
            return found[:MOST]
        found += _apart(one, other, f"step {step}")
    if len(expected) != len(ours) and not found:
        found.append(f"{len(ours)} steps, not {len(expected)}")
    return found[:MOST]


def _refusal(program: Program, ours: list[Any]) -> list[str]:
    last = ours[-1]
    if isinstance(last, Exception):
        raised = Raised.of(last)
        if "InvalidInput" in raised.classes and program.refusal in raised.text:
            return []
        return [f"refused, but not with InvalidInput that says {program.refusal!r}: {raised}"]
    return ["not refused"]


def _apart(one: Any, other: Any, where: str) -> list[str]:
    if isinstance(one, Exception) or isinstance(other, Exception):
        return _errors_apart(one, other, where)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _tensors_apart(one, other, where)
    if isinstance(one, dict) and isinstance(other, dict):
        return _dicts_apart(one, other, where)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [text for i, pair in pairs for text in _apart(*pair, f"{where}[{i}]")]
    if isinstance(one, Raised) and isinstance(other, Raised):
        return _raised_apart(one, other, where)
    return [] if one == other else [f"{where}: {_short(other)}, not {_short(one)}"]


def _errors_apart(one: Any, other: Any, where: str) -> list[str]:
    if isinstance(one, Exception) and isinstance(other, Exception):
        return _raised_apart(Raised.of(one), Raised.of(other), where)
    return [f"{where}: {_short(other)}, not {_short(one)}"]


def _raised_apart(one: Raised, other: Raised, where: str) -> list[str]:
    if one.family in other.classes:
        return []
    return [f"{where}: raised {other}, not {one}"]


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
    if isinstance(value, Exception):
        return f"raised {Raised.of(value)}"
    if isinstance(value, Tensor):
        return _values(value) if value.is_floating_point() else str(value.flatten()[:3])
    if isinstance(value, dict) and "yielded" in value:
        return "went on"
    return str(value)[:200]
