"""Count the FLOPs and the memory traffic of one PyTorch operation.

A multiplication and an addition are two FLOPs. Matrix products, convolutions and attention use
PyTorch's formulas (`torch.utils.flop_counter`), except that the weight gradient of a grouped
convolution counts once, not once per group. The FLOPs of other operations are in flops.toml and
this module: each addition, multiplication, division, comparison, root, exponential, logarithm and
error function in an operation's definition is one FLOP. An operation that is not listed costs one
FLOP per returned value. Moving data, such as embedding look-ups, costs bytes, but no FLOPs.

Attention costs its matrix products over all T x T scores, even with a causal mask. These are two
products in forward, and five in backward, which recomputes the scores. The softmax costs nothing.
"""

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

_Formula = Callable[[Sequence[Any], Any], int]

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_ALLOCATIONS, _FILLS, _RANDOM, _LOOKUPS, _OTHER_MOVES = (
    frozenset(_TABLES[name]) for name in ("allocations", "fills", "random", "lookups", "moves")
)
_MOVES = _ALLOCATIONS | _FILLS | _LOOKUPS | _OTHER_MOVES
_LSTM_LAYERS = frozenset({"mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"})
_PER_INPUT: dict[str, int] = _TABLES["per_input"]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Return all tensors in nested lists, tuples, mappings and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


def stored_nbytes(tensor: Tensor) -> int:
    """Return the bytes that a tensor's values take in memory; expanded values count once."""
    if tensor.layout == torch.sparse_coo:
        return stored_nbytes(tensor._indices()) + stored_nbytes(tensor._values())
    if tensor.layout != torch.strided:
        return tensor.numel() * tensor.element_size()
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    values = prod(size for size, stride in sides if stride or not size)
    return min(values * tensor.element_size(), tensor.untyped_storage().nbytes())


def allocates(func: OpOverload) -> bool:
    """Return whether `func` only allocates memory."""
    return _base_name(func) in _ALLOCATIONS


def nbytes_of(func: OpOverload, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """Return the bytes that `func` (any operation but a view) reads and writes."""
    name, written = _base_name(func), sum(map(stored_nbytes, outputs))
    if allocates(func):
        return 0
    if name in _FILLS or name in _RANDOM:
        return written
    if name in _LOOKUPS:
        return 2 * written + sum(map(stored_nbytes, inputs[1:]))
    if name == "copy":
        return written + sum(map(stored_nbytes, inputs[1:]))
    if name in _LSTM_LAYERS:
        # Recurrent weights are read in each time step.
        written += (len(inputs[0]) - 1) * stored_nbytes(inputs[2])
    return written + sum(map(stored_nbytes, inputs))


def flops_of(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the FLOPs of one call of `func`, which must not be a view."""
    name = _base_name(func)
    if kwargs.get("approximate") == "tanh":
        name = f"{name}_tanh"  # the tanh approximation of gelu has its own entry
    if name in _MOVES:
        return 0
    if name in _FORMULAS:
        return int(_FORMULAS[name](args, out))
    if func.overloadpacket in flop_registry:
        return int(flop_registry[func.overloadpacket](*args, **kwargs, out_val=out))
    if not any(t.is_floating_point() for t in tensors_in((args, out))):
        return 0
    if name in _PER_INPUT or torch.Tag.reduction in func.tags:
        return _PER_INPUT.get(name, 1) * next(tensors_in(args)).numel()
    return max((t.numel() for t in tensors_in(out)), default=0)


def _base_name(func: OpOverload) -> str:
    """Return the name of an operation, such as "add" for aten.add.Tensor and aten.add_.Tensor."""
    name: str = func.overloadpacket.__name__ if func.namespace == "aten" else func.name()
    return name.removesuffix("_")


def _convolution_backward(args: Sequence[Any], out: Any) -> int:
    """Count required gradients; input and weight cost as much as forward, the bias costs a sum."""
    gradient, x, weight = args[:3]
    transposed, mask = args[7], args[10]
    pixels = (x if transposed else gradient).shape[2:]
    product = 2 * x.shape[0] * prod(pixels) * weight.numel()
    return int(product * (mask[0] + mask[1]) + gradient.numel() * mask[2])


def _pool(args: Sequence[Any], out: Any) -> int:
    """Count one FLOP for each input value in a pooling window, for all windows."""
    return int(next(tensors_in(out)).numel() * _window(args[1], args[0].dim()))


def _window(size: Sequence[int], dim: int) -> int:
    # A single number is the size of each of the `dim` - 2 sides (without batch and channels).
    return prod(size) if len(size) > 1 else int(size[0]) ** (dim - 2)


def _rnn(args: Sequence[Any], out: Any) -> int:
    """Count the products with weight matrices in each time step, which dominate the cost."""
    x, weights = args[0], args[1] if isinstance(args[1], list | tuple) else args[1:5]
    return int(2 * prod(x.shape[:-1]) * sum(w.numel() for w in weights if w.dim() == 2))


def _lstm_layer(args: Sequence[Any], out: Any) -> int:
    """Count matrix products, and the additions, sigmoids, tanh and cell operations of each unit."""
    num_units = prod(args[0].shape[:2]) * args[2].shape[1]
    return int(_rnn(args, out) + num_units * (4 + 3 * 4 + 2 * 5 + 4))


def _trilinear(args: Sequence[Any], out: Any) -> int:
    """Count two multiplications and an addition per element of the tensors' broadcast shape."""
    shapes = []
    for tensor, new_dims in zip(args[:3], args[3:6], strict=True):
        shape = list(tensor.shape)
        for dim in sorted(new_dims):
            shape.insert(dim, 1)
        shapes.append(shape)
    return 3 * int(prod(torch.broadcast_shapes(*shapes)))


_aten = torch.ops.aten
_FORMULAS: dict[str, _Formula] = {
    "convolution_backward": _convolution_backward,
    # x * x, sqrt(x) and 1 / x are one FLOP; other powers are exp(b log(x)), three FLOPs.
    "pow": lambda args, out: (
        out.numel() * (3 if isinstance(args[1], Tensor) or args[1] not in {2, 0.5, -1} else 1)
    ),
    "_trilinear": _trilinear,
    "mv": lambda args, out: 2 * args[0].numel(),
    "addmv": lambda args, out: 2 * args[1].numel(),
    "dot": lambda args, out: 2 * args[0].numel(),
    "_embedding_bag": lambda args, out: args[1].numel() * args[0].shape[1],
    "_embedding_bag_backward": lambda args, out: args[1].numel() * args[0].shape[1],
    "index_add": lambda args, out: args[3].numel(),
    "scatter_add": lambda args, out: args[3].numel(),
    "index_put": lambda args, out: args[2].numel() if len(args) > 3 and args[3] else 0,
    # FLOPs per value: 2 to recompute the normalised value, 3 for two sums, and 4 for the input
    # gradient (1 in evaluation mode).
    "native_batch_norm_backward": lambda args, out: args[0].numel() * (9 if args[7] else 6),
    "cudnn_batch_norm_backward": lambda args, out: args[0].numel() * 9,  # only in training
    "_scaled_dot_product_flash_attention_for_cpu": lambda args, out: flop_registry[
        _aten._scaled_dot_product_flash_attention
    ](*args[:3], out_val=out),
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda args, out: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ](*args[:4], out_val=out),
}
for _backend in ("native", "cudnn"):
    # FLOPs per value: 4 to normalise and scale; in training, also 1 for the mean, 3 for variance.
    _FORMULAS[f"{_backend}_batch_norm"] = lambda args, out: args[0].numel() * (8 if args[5] else 4)
for _layer, _formula in (("mkldnn_rnn_layer", _lstm_layer), ("_cudnn_rnn", _rnn)):
    _FORMULAS[_layer] = _formula
    _FORMULAS[f"{_layer}_backward"] = lambda args, out: 2 * _rnn(args, out)
for _dims in ("2d", "3d"):
    _FORMULAS[f"max_pool{_dims}_with_indices"] = _FORMULAS[f"avg_pool{_dims}"] = _pool
    _FORMULAS[f"avg_pool{_dims}_backward"] = lambda args, out: (
        args[0].numel() * _window(args[2], args[0].dim())
    )
