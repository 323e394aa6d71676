"""Build a model with only this rank's rows of the head, the final layers that are sharded.

The model is built twice. The first build, on the meta device, numbers all tensors in the order of
creation, and finds the numbers of the head's tensors. The second build draws the same random
numbers as without sharding, but leaves the head's tensors on the meta device. An operation that
fills such a tensor runs on a temporary CPU tensor, and only this rank's rows of the temporary
tensor are kept.

The head's tensors must be made by `torch.empty`, as in torch's layers, and filled as a whole. If
building the model reads such a tensor, the whole model is built, and then cut layer by layer.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.core.balance import apportion

Build = Callable[[], nn.Module]
_EMPTY = torch.ops.aten.empty.memory_format
# Operations whose result does not depend on the tensor's previous values.
_FILLING = ("aten::normal_", "aten::uniform_", "aten::zero_", "aten::fill_", "aten::copy_")


@dataclass(frozen=True)
class Shard:
    """A rank's part of a layer's outputs: `size` outputs, beginning with number `first`."""

    first: int
    size: int

    def __call__(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Return a view of the shard's part of `tensor` in dimension `dim`."""
        return tensor.narrow(dim, self.first, self.size)


@dataclass(frozen=True)
class Sharding:
    """The number of a layer's outputs on each rank."""

    sizes: tuple[int, ...]

    @classmethod
    def even(cls, num_outputs: int, workers: int) -> Self:
        """Divide the outputs evenly; if a remainder is left, the first ranks get larger shards."""
        return cls(apportion(num_outputs, [1.0] * workers))

    @property
    def num_outputs(self) -> int:
        """The total number of outputs on all ranks."""
        return sum(self.sizes)

    def shard(self, rank: int) -> Shard:
        """Return the shard of a rank."""
        return Shard(sum(self.sizes[:rank]), self.sizes[rank])


class _WholeTensorRead(Exception):
    """The model read a tensor of which this rank keeps only some rows."""


def build_sharded(build: Build, shards: Mapping[str, Shard], seed: int) -> nn.Module:
    """Build a model after `torch.manual_seed(seed)`, with only this rank's rows of the head.

    `shards`: this rank's shard of each layer of the head, by layer name.
    """
    wanted: dict[int, Shard] = {}  # keys: numbers in order of creation by `torch.empty`
    numbers = _NumberTensors()
    with suppress(Exception), torch.device("meta"), torch.random.fork_rng(devices=[]), numbers:
        # A model that cannot be built on the meta device is built whole.
        for name, tensor in _head_tensors(build(), shards).items():
            storage = numbers.storages.get(tensor.untyped_storage()._cdata)
            if storage is not None:
                wanted[storage[0]] = shards[name.rpartition(".")[0]]
    torch.manual_seed(seed)
    mode = _KeepRows(wanted)
    try:
        with mode:
            model = build()
        filled = {name: mode.rows_of(one) for name, one in _head_tensors(model, shards).items()}
    except Exception:
        if not mode.was_read:  # the builder may wrap _WholeTensorRead in another error
            raise
        torch.manual_seed(seed)
        model, filled = build(), {}
    for name, shard in shards.items():
        _cut(model.get_submodule(name), shard, name, filled)
    return model


def _head_tensors(model: nn.Module, shards: Mapping[str, Shard]) -> dict[str, Tensor]:
    """Return the head's parameters and buffers that have a row for each output, by name."""
    found: dict[str, Tensor] = {}
    for name in shards:
        layer = model.get_submodule(name)
        for key, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            if tensor.dim():
                found[f"{name}.{key}"] = tensor
    return found


def _cut(module: nn.Module, shard: Shard, name: str, filled: Mapping[str, Tensor | None]) -> None:
    """Reduce a layer's tensors to the shard's rows; tensors in `filled` are already reduced."""
    parameters = dict(module.named_parameters(recurse=False))
    for key, tensor in {**parameters, **dict(module.named_buffers(recurse=False))}.items():
        if not tensor.dim():
            continue
        rows = filled.get(f"{name}.{key}")
        rows = shard(tensor.detach()).clone() if rows is None else rows
        own = nn.Parameter(rows, tensor.requires_grad) if key in parameters else rows
        setattr(module, key, own)
    for width in ("out_features", "num_features"):
        if hasattr(module, width):
            setattr(module, width, shard.size)


class _NumberTensors(TorchDispatchMode):
    """Numbers the tensors of `torch.empty`; `storages`: (number, storage) by storage address."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Keep the storages, so that no address is reused.
        self.storages: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation."""
        out = func(*args, **(kwargs or {}))
        if func is _EMPTY:
            storage = out.untyped_storage()
            self.storages[storage._cdata] = (len(self.storages), storage)
        return out


@dataclass
class _ShardedTensor:
    """A tensor of the head on the meta device; `values`: this rank's rows, None before the fill."""

    tensor: Tensor
    shard: Shard
    values: Tensor | None = None


class _KeepRows(TorchDispatchMode):
    """Keeps only a shard's rows of some tensors.

    `wanted`: shards, by the tensors' numbers in order of creation by `torch.empty`.
    """

    def __init__(self, wanted: Mapping[int, Shard]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._wanted = wanted
        self._number = 0
        self.was_read = False
        self._tensors: dict[int, _ShardedTensor] = {}

    def rows_of(self, tensor: Tensor) -> Tensor | None:
        """Return this rank's rows of a tensor, or None if the tensor is whole."""
        found = self._find(tensor)
        if found is not None and found.values is None:
            self._give_up()
        return None if found is None else found.values

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation; fill a temporary CPU tensor instead of a tensor of the head."""
        kwargs = kwargs or {}
        if func is _EMPTY:
            shard = self._wanted.get(self._number)
            self._number += 1
            if shard is None:
                return func(*args, **kwargs)
            tensor = func(*args, **{**kwargs, "device": torch.device("meta")})
            self._tensors[tensor.untyped_storage()._cdata] = _ShardedTensor(tensor, shard)
            return tensor
        found = self._find(args[0]) if args and isinstance(args[0], Tensor) else None
        is_read = any(isinstance(one, Tensor) and self._find(one) for one in args[1:])
        if found is not None and func._schema.is_mutable:
            target = args[0]
            is_filled = target.shape == found.tensor.shape and func._schema.name in _FILLING
            if is_read or not is_filled:
                self._give_up()
            whole = torch.empty(target.shape, dtype=target.dtype)
            func(whole, *args[1:], **kwargs)
            found.values = found.shard(whole).clone()
            return target
        is_view = any(one.alias_info is not None for one in func._schema.returns)
        if is_read or (found is not None and not is_view):
            self._give_up()
        return func(*args, **kwargs)

    def _give_up(self) -> NoReturn:
        self.was_read = True
        raise _WholeTensorRead

    def _find(self, tensor: Tensor) -> _ShardedTensor | None:
        if tensor.device.type != "meta":
            return None
        return self._tensors.get(tensor.untyped_storage()._cdata)
