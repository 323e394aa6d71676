"""Gather and sum encoded rows of all ranks, with or without autograd (Dettmers 2016, section 2.1).

                 each rank sends                           each rank gets
all_gather       to every other rank, its own rows         the rows of all ranks, in rank order
reduce_scatter   to every other rank, that rank's rows     its own rows, summed over all ranks

A model-parallel layer gathers activations in forward, and sums their gradients in backward.
Activations and gradients each have their own codec. If a codec is None, values are sent unencoded.
"""

import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.codecs.codec import Cast, Codec, Payload, pack, row_nbytes, unpack
from paceline.codecs.feedback import ErrorFeedback
from paceline.codecs.names import find_codec
from paceline.core.balance import evenly
from paceline.core.errors import InvalidInput, NonFinite
from paceline.links.all_to_all import AllToAll


@dataclass
class Sent:
    """Counts the bytes sent by this rank, including 40 header bytes per message."""

    activations_sent: int = 0
    activation_gradients_sent: int = 0


@dataclass(frozen=True, eq=False)
class Pending:
    """An exchange that runs in the background; call `wait` once to get the resulting values.

    `wait` raises NonFinite on all ranks if any rank has NaN or infinite values.
    """

    wait: Callable[[], Tensor]


def all_gather(
    x: Tensor,
    codec: str | Codec | None = None,
    *,
    activation_gradients: str | Codec | None = None,
    group: dist.ProcessGroup | None = None,
    sizes: Sequence[int] | None = None,
    traffic: Sent | None = None,
    what: str = "x",
) -> Tensor:
    """Gather the rows of all ranks, in rank order, with the same bits on each rank.

    `x` has this rank's rows in dimension 0. `codec`: codec of the rows in forward; None: not
    encoded. `activation_gradients`: codec of the rows' gradients in backward. A codec requires
    float32 values. `sizes`: number of rows on each rank; if None, the ranks exchange these numbers
    first. `traffic` counts the bytes sent. `what`: name of `x` in errors. With a single rank, the
    result is `x`.

    In backward, each rank receives the gradients of its own rows from all ranks, and adds them in
    rank order, in float32. This sum is the gradient of the sum of all ranks' losses. All ranks must
    make the same calls in the same order, and run backward through the results.

    Raises InvalidInput if `sizes` do not fit `x`. If `sizes` is None, also raises InvalidInput if
    ranks differ in dtype, row shape or codec.
    Raises NonFinite on all ranks if any rank has NaN or infinite values.
    """
    known = _sizes(x, (codec, activation_gradients), group, sizes, what)
    codec_for(activation_gradients, x.dtype)  # raise errors here, not later in backward
    if len(known) == 1:
        return x
    forward = RowExchange(codec, group, known, traffic, what)
    backward = forward.of_gradients(activation_gradients)
    gathered: Tensor = _Exchanged.apply(x, forward.all_gather, backward.reduce_scatter)  # type: ignore[no-untyped-call]
    return gathered


def reduce_scatter(
    x: Tensor,
    codec: str | Codec | None = None,
    *,
    activation_gradients: str | Codec | None = None,
    group: dist.ProcessGroup | None = None,
    sizes: Sequence[int] | None = None,
    traffic: Sent | None = None,
    what: str = "x",
) -> Tensor:
    """Sum each row over all ranks; return the sums of this rank's rows.

    This is the reverse of `all_gather`. On each rank, `x` has the rows of all ranks in dimension 0.
    `sizes`: the number of rows of each rank; if None, the rows are divided evenly, and the first
    ranks get one row more if a remainder is left. The other arguments and the errors are the same
    as in `all_gather`.
    """
    num_ranks = len(ranks_of(group))
    if sizes is None and x.dim():
        sizes = evenly(len(x), num_ranks)
    codec_for(activation_gradients, x.dtype)
    forward = RowExchange(codec, group, tuple(sizes or ()), traffic, what)
    backward = forward.of_gradients(activation_gradients)
    if len(forward.sizes) == 1:
        return x
    summed: Tensor = _Exchanged.apply(x, forward.reduce_scatter, backward.all_gather)  # type: ignore[no-untyped-call]
    return summed


_Begin = Callable[[Tensor], Pending]


class _Exchanged(torch.autograd.Function):
    """Runs an exchange in forward, and the reverse exchange of gradients in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, begin: _Begin, begin_backward: _Begin) -> Tensor:
        ctx.begin_backward = begin_backward
        return begin(x).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.begin_backward(gradients[0]).wait(), None, None


def _sizes(
    values: Tensor,
    codecs: Sequence[str | Codec | None],
    group: dist.ProcessGroup | None,
    sizes: Sequence[int] | None,
    what: str,
) -> tuple[int, ...]:
    """Return each rank's number of rows: `sizes` or, if None, numbers that the ranks exchange.

    If they exchange numbers, raises InvalidInput if ranks differ in dtype, row shape or codec.
    """
    ranks = ranks_of(group)
    if sizes is not None:
        return tuple(sizes)
    if values.dim() == 0:
        raise InvalidInput(what, "must have rows in dimension 0, but is a scalar")
    if len(ranks) == 1:
        return (len(values),)
    names = [codec_for(codec, values.dtype).name for codec in codecs]
    kind = f"{values.dtype} rows of shape {list(values.shape[1:])}, sent by {' and '.join(names)}"
    own = torch.tensor([len(values), zlib.crc32(kind.encode())], device=values.device)
    gathered = [torch.empty_like(own) for _ in ranks]
    dist.all_gather(gathered, own, group=group)
    found = [one.tolist() for one in gathered]
    for rank, (_, checksum) in zip(ranks, found, strict=True):
        if checksum != zlib.crc32(kind.encode()):
            both = f"{dist.get_rank()} and {rank}"
            problem = f"must have the same type, row shape and codecs on ranks {both}"
            raise InvalidInput(what, problem, got=kind)
    return tuple(count for count, _ in found)


@dataclass(frozen=True)
class RowExchange:
    """Exchanges rows between the ranks of a group, without autograd.

    `sizes`: each rank's number of rows. `in_forward`: if true, `traffic` counts the bytes as
    activations; if false, as activation gradients. `what`: name of the rows in errors. All ranks
    must begin their exchanges in the same order. Each thread that exchanges rows needs its own
    group. Methods copy the rows, so the caller may change them afterwards. But in a group of one
    rank, methods copy, encode and send nothing: the result is a detached view of the rows.
    """

    codec: str | Codec | None
    group: dist.ProcessGroup | None
    sizes: Sequence[int]
    traffic: Sent | None = None
    what: str = "activations"
    in_forward: bool = True

    def of_gradients(self, codec: str | Codec | None) -> "RowExchange":
        """Return a `RowExchange` for the gradients of the rows; it encodes them with `codec`."""
        return replace(self, codec=codec, what=f"the gradient of {self.what}", in_forward=False)

    def all_gather(self, values: Tensor) -> Pending:
        """Begin to gather the rows of all ranks in rank order, with the same bits on each rank."""
        own = self._check(values, all_rows=False)
        if len(self.sizes) == 1:
            return Pending(values.detach)
        form = codec_for(self.codec, values.dtype)
        counts = [rows * values.shape[1:].numel() for rows in self.sizes]
        lengths = [row_nbytes(form.nbytes(count)) for count in counts]
        row = _row(form.encode(values), form, values)
        posted = self._post([row] * len(counts), lengths)
        shape, dtype = (sum(self.sizes), *values.shape[1:]), values.dtype

        def finish() -> Tensor:
            rows = posted.wait()
            rows[own] = row  # encoded like the others, so that all ranks decode the same bits
            whole = torch.empty(sum(counts), dtype=dtype, device=row.device)
            found = []
            for one, part in zip(rows, whole.split(counts), strict=True):
                [payload] = unpack(one.unsqueeze(0), form.name, len(part))
                form.decode(payload, out=part)
                found.append(payload.num_nonfinite)
            self._check_finite(form, found)
            return whole.view(shape)

        return Pending(finish)

    def reduce_scatter(self, values: Tensor) -> Pending:
        """Begin to sum rows over all ranks; each rank gets the sums of its own rows.

        Values are added in rank order: float64 values in float64, all others in float32. A rank
        does not encode the rows that it keeps.
        """
        own = self._check(values, all_rows=True)
        if len(self.sizes) == 1:
            return Pending(values.detach)
        form, parts = codec_for(self.codec, values.dtype), values.detach().split(list(self.sizes))
        if not values.dtype.is_floating_point:
            raise InvalidInput(self.what, "must be floating point to be summed", got=values.dtype)
        # Copy, because the caller may change `values` before `wait`.
        sum_type = torch.promote_types(values.dtype, torch.float32)
        mine = parts[own].reshape(-1).to(sum_type, copy=True)
        payloads = [form.encode(part) for rank, part in enumerate(parts) if rank != own]
        own_found = len(mine) - int(mine.isfinite().sum())
        own_found += sum(payload.num_nonfinite for payload in payloads)
        # Send every rank the number of non-finite values in all rows of this rank. Then all ranks
        # raise NonFinite, even a rank that receives only finite rows.
        rows = [_row(replace(one, num_nonfinite=own_found), form, values) for one in payloads]
        rows.insert(own, rows[0][:0])  # a rank sends nothing to itself
        posted = self._post(rows, [row_nbytes(form.nbytes(len(mine)))] * len(rows))
        shape, dtype = parts[own].shape, values.dtype

        def finish() -> Tensor:
            total, found = torch.zeros_like(mine), []
            for rank, row in enumerate(posted.wait()):
                if rank == own:
                    total += mine
                    found.append(own_found)
                    continue
                [payload] = unpack(row.unsqueeze(0), form.name, len(mine))
                form.add_to(total, payload)
                found.append(payload.num_nonfinite)
            self._check_finite(form, found)
            return total.view(shape).to(dtype)

        return Pending(finish)

    def _check(self, values: Tensor, all_rows: bool) -> int:
        """Return this rank's index in the group; InvalidInput if `values` do not fit `sizes`.

        `all_rows`: whether `values` must have the rows of all ranks, or only of this rank.
        """
        ranks = ranks_of(self.group)
        if len(self.sizes) != len(ranks) or min(self.sizes) < 0:
            problem = f"must list the number of rows on each of {len(ranks)} ranks"
            raise InvalidInput("sizes", problem, got=list(self.sizes))
        own = dist.get_rank(self.group) if len(ranks) > 1 else 0
        expected = sum(self.sizes) if all_rows else self.sizes[own]
        if values.dim() == 0 or len(values) != expected:
            problem = f"must have {expected} rows on rank {ranks[own]} (sizes={list(self.sizes)})"
            raise InvalidInput(self.what, problem, got=list(values.shape))
        return own

    def _post(self, rows: Sequence[Tensor], lengths: Sequence[int]) -> AllToAll:
        posted, traffic = AllToAll(rows, lengths, self.group), self.traffic
        if traffic is not None and self.in_forward:
            traffic.activations_sent += posted.sent_nbytes
        elif traffic is not None:
            traffic.activation_gradients_sent += posted.sent_nbytes
        return posted

    def _check_finite(self, form: Codec, found: Sequence[int]) -> None:
        for rank, num_nonfinite in zip(ranks_of(self.group), found, strict=True):
            if num_nonfinite:
                raise NonFinite(
                    f"{self.what}: {num_nonfinite} values of rank {rank} are NaN or infinite "
                    f"(codec {form.name})"
                )


def _row(payload: Payload, form: Codec, values: Tensor) -> Tensor:
    """Pack a payload into the row of bytes to send, on the device of `values`."""
    return pack([payload], row_nbytes(form.nbytes(payload.count)), values.device)[0]


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Return the global ranks of a group; [0] in a single process without torch.distributed."""
    if group is not None and dist.get_rank(group) < 0:
        raise InvalidInput("group", f"does not include rank {dist.get_rank()}")
    if dist.is_initialized():
        return dist.get_process_group_ranks(group or dist.group.WORLD)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InvalidInput(
            "group", "requires torch.distributed.init_process_group, because WORLD_SIZE > 1"
        )
    return [0]


def codec_for(codec: str | Codec | None, dtype: torch.dtype) -> Codec:
    """Return the codec for rows of type `dtype`; if `codec` is None, an exact `Cast`.

    Raises InvalidInput if there is a codec and the rows are not float32. Also raises InvalidInput
    for a codec with error feedback, or with a payload size that depends on the values.
    """
    if codec is None:
        return Cast(str(dtype).removeprefix("torch."), exact=True)
    if dtype != torch.float32:
        raise InvalidInput("codec", "requires float32 values", got=dtype)
    form = find_codec(codec) if isinstance(codec, str) else codec
    if isinstance(form, ErrorFeedback):
        problem = "cannot have error feedback, because rows of different batches are unrelated"
        raise InvalidInput("codec", problem, got=form.name, hint="choose dynamic8 or half")
    if not form.fixed_size:
        problem = "must have a payload size that does not depend on the values"
        raise InvalidInput("codec", problem, got=form.name, hint="choose dynamic8 or half")
    return form
