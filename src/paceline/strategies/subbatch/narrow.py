"""Build a model of which a rank has some rows of the head's parameters.

The model is built twice. The first time all of it is on the meta device, which shows its layers and
which tensor of those that it makes becomes which parameter. The second time it is built as ever,
with the same random numbers, but the head's tensors stay on the meta device: each time that one is
filled, it is made for a moment, filled, and cut down to this rank's rows. So no more than one of
the head's tensors is ever whole.

That is possible where a tensor is made by `torch.empty`, as in torch's own layers, and only ever
filled as a whole. Where it is read meanwhile, the model is built whole, and then cut layer by
layer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.strategies.subbatch.loss import Columns

Build = Callable[[], nn.Module]
_EMPTY = torch.ops.aten.empty.memory_format
# What these write does not depend on what was there.
_FILLING = ("aten::normal_", "aten::uniform_", "aten::zero_", "aten::fill_", "aten::copy_")


class _ReadWhole(Exception):
    """Something has read a tensor of which there are only some rows."""


def narrowed(build: Build, columns: Mapping[str, Columns], seed: int) -> nn.Module:
    """Return the model that `build` makes after `torch.manual_seed(seed)`, its head cut down.

    `columns` are those of the outputs that this rank has, of each layer of the head by its name.
    The parameters and buffers of these, one row for each output, keep these rows.
    """
    wanted = _places(build, columns)
    torch.manual_seed(seed)
    kept = _Kept(wanted)
    try:
        with kept:
            model = build()
        taken = {name: kept.rows_of(tensor) for name, tensor in _tensors(model, columns).items()}
    except Exception:
        if not kept.was_read:  # which whoever builds the model may have told in another way
            raise
        torch.manual_seed(seed)
        model, taken = build(), {}
    for name, own in columns.items():
        _cut(model.get_submodule(name), own, name, taken)
    return model


def _tensors(model: nn.Module, columns: Mapping[str, Columns]) -> dict[str, Tensor]:
    """Return the head's tensors of one row for each output, by their names in the model."""
    return {
        f"{name}.{key}": tensor
        for name in columns
        for group in (
            model.get_submodule(name).named_parameters(),
            model.get_submodule(name).named_buffers(),
        )
        for key, tensor in group
        if tensor.dim()
    }


def _cut(module: nn.Module, own: Columns, name: str, taken: Mapping[str, Tensor | None]) -> None:
    """Leave a layer these rows of its tensors; `taken` are those that there already are."""

    def rows(key: str, tensor: Tensor) -> Tensor:
        found = taken.get(f"{name}.{key}")
        return tensor[own.first : own.first + own.width].clone() if found is None else found

    for key, parameter in list(module.named_parameters(recurse=False)):
        cut = nn.Parameter(rows(key, parameter.detach()), parameter.requires_grad)
        setattr(module, key, cut)
    for key, buffer in list(module.named_buffers(recurse=False)):
        if buffer.dim():
            setattr(module, key, rows(key, buffer))
    for width in ("out_features", "num_features"):
        if hasattr(module, width):
            setattr(module, width, own.width)


def _places(build: Build, columns: Mapping[str, Columns]) -> dict[int, Columns]:
    """Return which of the tensors that are made become the head's, and which rows are kept."""
    made = _Made()
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]), made:
            model = build()
    except Exception:
        return {}  # it cannot be built there, and is built whole
    return {
        made.numbers[id(storage)]: columns[name.rpartition(".")[0]]
        for name, tensor in _tensors(model, columns).items()
        if id(storage := _known(tensor, made.storages)) in made.numbers
    }


def _known(tensor: Tensor, storages: Mapping[int, torch.UntypedStorage]) -> object:
    return storages.get(tensor.untyped_storage()._cdata)


class _Made(TorchDispatchMode):
    """Counts the tensors that `torch.empty` makes, and knows them again by their storages."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.numbers: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation."""
        out = func(*args, **(kwargs or {}))
        if func is _EMPTY:
            storage = out.untyped_storage()
            self.storages[storage._cdata] = storage  # kept, so that no other gets its address
            self.numbers[id(storage)] = len(self.numbers)
        return out


@dataclass
class _Rows:
    """A tensor of the head: as it looks, which rows there are, and these once it was filled."""

    tensor: Tensor
    columns: Columns
    values: Tensor | None = None


class _Kept(TorchDispatchMode):
    """Keeps of the tensors of these numbers the rows that are wanted."""

    def __init__(self, wanted: Mapping[int, Columns]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._wanted = wanted
        self._number = 0
        self.was_read = False
        self._rows: dict[int, _Rows] = {}

    def rows_of(self, tensor: Tensor) -> Tensor | None:
        """Return the rows of a tensor, or None if it is whole."""
        found = self._of(tensor)
        if found is None:
            return None
        if found.values is None:
            self._refuse()
        return found.values

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation; on a tensor of the head, on one that is there for a moment."""
        kwargs = kwargs or {}
        if func is _EMPTY:
            return self._make(func, args, kwargs)
        found = self._of(args[0]) if args and isinstance(args[0], Tensor) else None
        others = any(isinstance(one, Tensor) and self._of(one) for one in args[1:])
        if others:
            self._refuse()
        if found is None:
            return func(*args, **kwargs)
        if not func._schema.is_mutable:
            if not _is_alias(func):
                self._refuse()
            return func(*args, **kwargs)
        self._fill(found, args[0], func, args[1:], kwargs)
        return args[0]

    def _refuse(self) -> NoReturn:
        self.was_read = True
        raise _ReadWhole

    def _make(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = self._wanted.get(self._number)
        self._number += 1
        if own is None:
            return func(*args, **kwargs)
        tensor = func(*args, **{**kwargs, "device": torch.device("meta")})
        self._rows[tensor.untyped_storage()._cdata] = _Rows(tensor, own)
        return tensor

    def _of(self, tensor: Tensor) -> _Rows | None:
        if tensor.device.type != "meta":
            return None
        return self._rows.get(tensor.untyped_storage()._cdata)

    def _fill(
        self,
        found: _Rows,
        tensor: Tensor,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        if tensor.shape != found.tensor.shape or func._schema.name not in _FILLING:
            self._refuse()
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        func(whole, *args, **kwargs)
        first, width = found.columns.first, found.columns.width
        found.values = whole[first : first + width].clone()


def _is_alias(func: OpOverload) -> bool:
    return any(one.alias_info is not None for one in func._schema.returns)
