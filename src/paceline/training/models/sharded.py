"""Build a model with only this rank's rows of the head, the final layers that are sharded.

The model is built twice. The first build, on the meta device, counts the tensors in the order of
creation, to find which of them belong to the head. The second build draws the same random numbers
as without sharding, but leaves the head's tensors on the meta device. An operation that fills such
a tensor runs on a temporary CPU tensor, of which only this rank's rows are kept.

This requires that the head's tensors are made by `torch.empty`, as in torch's layers, and filled as
a whole. If building the model reads such a tensor, the whole model is built instead, and then this
rank's rows are copied layer by layer.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.core.balance import evenly
from paceline.training.models.live_memory import storage_of

Build = Callable[[], nn.Module]
_EMPTY = torch.ops.aten.empty.memory_format
# In-place operations whose result does not depend on the tensor's previous values.
_FILLING = ("aten::normal_", "aten::uniform_", "aten::zero_", "aten::fill_", "aten::copy_")


@dataclass(frozen=True)
class Shard:
    """A rank's part of a layer's outputs: the outputs from `first` to `first + size - 1`."""

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
        """Divide outputs evenly among workers; a remainder goes to the first ranks, one each."""
        return cls(evenly(num_outputs, workers))

    @property
    def num_outputs(self) -> int:
        """The total number of outputs on all ranks."""
        return sum(self.sizes)

    def shard(self, rank: int) -> Shard:
        """Return the shard of a rank."""
        return Shard(sum(self.sizes[:rank]), self.sizes[rank])


class _WholeTensorRead(Exception):
    """Building the model has read a tensor of which this rank keeps only some rows."""


def build_sharded(build: Build, shards: Mapping[str, Shard], seed: int) -> nn.Module:
    """Build a model after `torch.manual_seed(seed)`, with only this rank's rows of the head.

    `shards`: this rank's shard of each layer of the head, by layer name.
    """
    torch.manual_seed(seed)
    mode = _KeepRows(_numbered(build, shards))
    try:
        with mode:
            model = build()
        _cut(model, shards, mode)
    except Exception:
        if not mode.was_read:  # the cause is not _WholeTensorRead, wrapped or not
            raise
        torch.manual_seed(seed)
        model = build()
        _cut(model, shards, _KeepRows({}))
    return model


def _numbered(build: Build, shards: Mapping[str, Shard]) -> dict[int, Shard]:
    """Map each tensor of the head to its shard; key n is the n-th tensor that the model creates.

    Returns {} if the model cannot be built on the meta device; then the whole model is built.
    """
    mode = _KeepRows({})
    with suppress(Exception), torch.device("meta"), torch.random.fork_rng(devices=[]), mode:
        tensors = _split_tensors(build(), shards)
        of_head = {storage_of(tensor): shard for _, _, tensor, shard in tensors}
        return {n: of_head[one] for n, one in enumerate(mode.made) if one in of_head}
    return {}


def _split_tensors(
    model: nn.Module, shards: Mapping[str, Shard]
) -> Iterator[tuple[nn.Module, str, Tensor, Shard]]:
    """Yield (layer, name, tensor, shard) for head tensors with a row for each output."""
    for name, shard in shards.items():
        layer = model.get_submodule(name)
        for key, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            if tensor.dim():
                yield layer, key, tensor, shard


def _cut(model: nn.Module, shards: Mapping[str, Shard], mode: "_KeepRows") -> None:
    """Reduce the head's tensors to this rank's rows, unless `mode` has already done so."""
    for layer, key, tensor, shard in _split_tensors(model, shards):
        kept = mode.rows_of(tensor)
        rows = shard(tensor.detach()).clone() if kept is None else kept
        is_parameter = isinstance(tensor, nn.Parameter)
        setattr(layer, key, nn.Parameter(rows, tensor.requires_grad) if is_parameter else rows)
        for width in ("out_features", "num_features"):
            if hasattr(layer, width):
                setattr(layer, width, shard.size)


@dataclass
class _ShardedTensor:
    """A head tensor on the meta device; `values`: this rank's rows, None until it is filled."""

    tensor: Tensor
    shard: Shard
    values: Tensor | None = None


class _KeepRows(TorchDispatchMode):
    """A context in which only this rank's rows of the head's tensors are kept.

    `wanted[n]`: the shard to keep of tensor n, counted from 0 in the order in which `torch.empty`
    creates tensors. `made`: the storages of all tensors that `torch.empty` has created.
    """

    def __init__(self, wanted: Mapping[int, Shard]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._wanted = wanted
        self.made: list[StorageWeakRef | None] = []
        self.was_read = False
        self._tensors: dict[StorageWeakRef | None, _ShardedTensor] = {}

    def rows_of(self, tensor: Tensor) -> Tensor | None:
        """Return this rank's rows of a tensor, or None if the tensor is not sharded."""
        if (found := self._find(tensor)) is None:
            return None
        return self._give_up() if found.values is None else found.values

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation; if it fills a head tensor, fill a temporary CPU tensor instead."""
        kwargs = kwargs or {}
        if func is _EMPTY:
            shard = self._wanted.get(len(self.made))
            tensor = func(*args, **kwargs | ({"device": torch.device("meta")} if shard else {}))
            self.made.append(storage_of(tensor))
            if shard is not None:
                self._tensors[self.made[-1]] = _ShardedTensor(tensor, shard)
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
        return self._tensors.get(storage_of(tensor))
