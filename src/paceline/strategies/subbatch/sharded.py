"""Models of which each rank has a part, in one safetensors file: any number of ranks, or one.

A split tensor's rows lie in the file rank after rank, which is how its rows are shared. So rank 0
writes them as they come, and never has a whole head; each rank reads those rows alone that it has.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from paceline.core.errors import InvalidInput
from paceline.links.group import Group
from paceline.strategies.subbatch.split import Widths

_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8


def save(path: Path, model: nn.Module, split: Mapping[str, Widths], group: Group) -> None:
    """Write the whole model to `path`, as rank 0 sees it; all ranks call it together.

    `split` are the layers of the head, whose tensors have one row for each of this rank's outputs.
    Tensors that the model has under several names stand there under the first.
    """
    tensors = _tensors(model)
    if group.rank != 0:
        for name, tensor in tensors.items():
            if _widths(name, tensor, split) is not None:
                dist.send(tensor.detach().cpu().contiguous(), 0, group=group.control)
        return
    with path.open("wb") as file:
        file.write(_header({name: _whole(name, one, split) for name, one in tensors.items()}))
        for name, tensor in tensors.items():
            for part in _parts(tensor, _widths(name, tensor, split), group):
                _write(file, part)


def load(path: Path, model: nn.Module, split: Mapping[str, Widths], rank: int) -> None:
    """Take over the tensors of a file that `save` or safetensors' `save_model` has written.

    InvalidInput names what does not fit.
    """
    tensors = _tensors(model)
    try:
        with safe_open(str(path), framework="pt") as file:
            known = set(file.keys())
            _check_names(path, known, set(tensors))
            for name, tensor in tensors.items():
                part = file.get_slice(name)
                whole = _whole(name, tensor, split)
                if list(part.get_shape()) != whole[1]:
                    raise InvalidInput(
                        f"{path}: {name!r} is of shape {part.get_shape()}, and not {whole[1]}"
                    )
                widths = _widths(name, tensor, split)
                own = widths.columns(rank) if widths else None
                rows = part[own.first : own.first + own.width] if own else file.get_tensor(name)
                if rows.dtype != tensor.dtype:
                    raise InvalidInput(f"{path}: {name!r} is {rows.dtype}, and not {tensor.dtype}")
                with torch.no_grad():
                    tensor.copy_(rows)
    except (OSError, SafetensorError) as error:
        raise InvalidInput(f"{path}: cannot be read: {error}") from None


def _check_names(path: Path, known: set[str], wanted: set[str]) -> None:
    if known != wanted:
        name = min(known ^ wanted)
        where = "is in the model, but not in the file" if name in wanted else "is not in the model"
        raise InvalidInput(f"{path}: {name!r} {where}")


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the model's state, shared ones once, in the order of a file.

    That is the larger types first, so that each tensor begins on a whole value.
    """
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor) or tensor.dtype not in _TYPES:
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InvalidInput(f"{name!r} of the model's state is {kind}, and cannot be saved")
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return dict(sorted(found.items(), key=lambda one: (-one[1].element_size(), one[0])))


def _widths(name: str, tensor: Tensor, split: Mapping[str, Widths]) -> Widths | None:
    """Return how a tensor's rows are shared; None if each rank has all of it."""
    return split.get(name.rpartition(".")[0]) if tensor.dim() else None


def _whole(name: str, tensor: Tensor, split: Mapping[str, Widths]) -> tuple[torch.dtype, list[int]]:
    widths = _widths(name, tensor, split)
    rows = tensor.shape[:1] if widths is None else (widths.whole,)
    return tensor.dtype, [*rows, *tensor.shape[1:]]


def _header(tensors: Mapping[str, tuple[torch.dtype, list[int]]]) -> bytes:
    entries, begin = dict[str, object](), 0
    for name, (dtype, shape) in tensors.items():
        end = begin + dtype.itemsize * torch.Size(shape).numel()
        entries[name] = {"dtype": _TYPES[dtype], "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _parts(tensor: Tensor, widths: Widths | None, group: Group) -> Iterator[Tensor]:
    """Yield the rows of all ranks, in rank order."""
    own = tensor.detach().cpu().contiguous()
    yield own
    for rank in range(1, len(widths.parts) if widths else 0):
        assert widths is not None
        part = torch.empty(widths.parts[rank], *tensor.shape[1:], dtype=tensor.dtype)
        with group.naming_the_lost():
            dist.recv(part, rank, group=group.control)
        yield part


def _write(file: BinaryIO, tensor: Tensor) -> None:
    file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
