"""Activations and errors that travel between ranks encoded: in autograd, and without it.

A model-parallel layer works on the rows of all ranks and returns to each the errors of its own
(Dettmers 2016, 2.1). Activations and errors have a codec of their own; None sends them as they are.
"""

import os
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.codecs.between import Between, Pending, Sent, form_of, ranks_of
from paceline.codecs.codec import Codec
from paceline.core.errors import InvalidInput

__all__ = [
    "Pending",
    "Sent",
    "all_gather",
    "all_gather_values",
    "begin_gather",
    "begin_return",
    "reduce_scatter",
    "return_errors",
]


def all_gather(
    x: Tensor,
    codec: str | Codec | None = None,
    *,
    errors: str | Codec | None = None,
    group: dist.ProcessGroup | None = None,
    sizes: Sequence[int] | None = None,
    traffic: Sent | None = None,
    what: str = "x",
) -> Tensor:
    """Return the rows of all ranks, in rank order, the same bits on each.

    `x` has this rank's rows in dimension 0; `sizes` are their numbers on all ranks, exchanged if
    they are not given. In backward each rank sends the gradients of other ranks' rows to these by
    codec `errors`, and adds up what it has and gets of its own, decoded to float32, in rank order:
    the derivative of the sum of all ranks' losses. What travels by a codec must be float32.

    All ranks call it in the same order, and run backward through it. InvalidInput for what does
    not fit, NonFinite on all ranks with the rank whose values are NaN or infinite; `what` names
    them there. `traffic` counts the bytes. A rank alone returns x as it is.
    """
    known = _sizes(x, (codec, errors), group, sizes, what)
    form_of(errors, x.dtype)
    if len(known) == 1:
        return x
    there = Between(codec, group, known, traffic, what)
    back = Between(errors, group, known, traffic, f"the gradient of {what}", in_forward=False)
    gathered: Tensor = _Gather.apply(x, there, back)  # type: ignore[no-untyped-call]
    return gathered


def reduce_scatter(
    x: Tensor,
    codec: str | Codec | None = None,
    *,
    errors: str | Codec | None = None,
    group: dist.ProcessGroup | None = None,
    sizes: Sequence[int] | None = None,
    traffic: Sent | None = None,
    what: str = "x",
) -> Tensor:
    """Return the sum over all ranks of the rows that belong to this one: `all_gather` turned round.

    `x` has rows for all ranks in dimension 0, as many as `sizes` says for each; by default they
    are shared as equally as possible, the first ranks having one more. They travel by `codec`, the
    gradients of the sums to all ranks by `errors`. For the rest it is as `all_gather`.
    """
    num_ranks = len(ranks_of(group))
    if sizes is None and x.dim():
        sizes = [len(x) // num_ranks + (rank < len(x) % num_ranks) for rank in range(num_ranks)]
    _check_joined(group)
    form_of(errors, x.dtype)
    there = Between(codec, group, tuple(sizes or ()), traffic, what)
    back = Between(errors, group, there.sizes, traffic, f"the gradient of {what}", in_forward=False)
    if len(there.sizes) == 1:
        return x
    summed: Tensor = _Give.apply(x, there, back)  # type: ignore[no-untyped-call]
    return summed


def all_gather_values(
    values: Tensor,
    codec: str | Codec | None = None,
    group: dist.ProcessGroup | None = None,
    sizes: Sequence[int] | None = None,
    *,
    traffic: Sent | None = None,
    what: str = "activations",
) -> Tensor:
    """Return what `all_gather` does, without autograd."""
    return begin_gather(values, codec, group, sizes, traffic=traffic, what=what).wait()


def begin_gather(
    values: Tensor,
    codec: str | Codec | None = None,
    group: dist.ProcessGroup | None = None,
    sizes: Sequence[int] | None = None,
    *,
    traffic: Sent | None = None,
    what: str = "activations",
) -> Pending:
    """Begin `all_gather_values`; `values` may change before it is waited for."""
    known = _sizes(values, (codec,), group, sizes, what)
    return Between(codec, group, known, traffic, what).gather(values)


def return_errors(
    errors: Tensor,
    codec: str | Codec | None,
    group: dist.ProcessGroup | None,
    sizes: Sequence[int],
    *,
    traffic: Sent | None = None,
    what: str = "errors",
) -> Tensor:
    """Return the sum over all ranks of the rows that are this rank's by `sizes`.

    It is the backward of `all_gather`: `errors` has the rows of all ranks.
    """
    return begin_return(errors, codec, group, sizes, traffic=traffic, what=what).wait()


def begin_return(
    errors: Tensor,
    codec: str | Codec | None,
    group: dist.ProcessGroup | None,
    sizes: Sequence[int],
    *,
    traffic: Sent | None = None,
    what: str = "errors",
) -> Pending:
    """Begin `return_errors`; `errors` may change before it is waited for."""
    _check_joined(group)
    return Between(codec, group, tuple(sizes), traffic, what, in_forward=False).give(errors)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Between, back: Between) -> Tensor:
        ctx.back = back
        return there.gather(x).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back.give(gradients[0]).wait(), None, None


class _Give(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Between, back: Between) -> Tensor:
        ctx.back = back
        return there.give(x).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back.gather(gradients[0]).wait(), None, None


def _sizes(
    values: Tensor,
    codecs: Sequence[str | Codec | None],
    group: dist.ProcessGroup | None,
    sizes: Sequence[int] | None,
    what: str,
) -> tuple[int, ...]:
    """Return how many rows each rank has: if that is not given, they tell each other."""
    _check_joined(group)
    ranks = ranks_of(group)
    if sizes is not None:
        return tuple(sizes)
    if values.dim() == 0:
        raise InvalidInput(f"{what}: a single value; give rows, in dimension 0")
    if len(ranks) == 1:
        return (len(values),)
    names = [form_of(codec, values.dtype).name for codec in codecs]
    kind = f"{values.dtype} rows of shape {list(values.shape[1:])}, sent by {' and '.join(names)}"
    own = torch.tensor([len(values), zlib.crc32(kind.encode())], device=values.device)
    found = [torch.empty_like(own) for _ in ranks]
    dist.all_gather(found, own, group=group)
    told = [one.tolist() for one in found]
    for rank, (_, checksum) in zip(ranks, told, strict=True):
        if checksum != zlib.crc32(kind.encode()):
            raise InvalidInput(
                f"{what}: rank {rank} has others than rank {dist.get_rank()}, which has {kind}; "
                "give all ranks the same"
            )
    return tuple(count for count, _ in told)


def _check_joined(group: dist.ProcessGroup | None) -> None:
    """Raise InvalidInput where ranks were started together, but would each be left alone."""
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InvalidInput("all_gather: call torch.distributed.init_process_group before")
    if group is not None and dist.get_rank(group) < 0:
        raise InvalidInput(f"group: rank {dist.get_rank()} is not one of it")
