"""Gathers and sums of encoded activations and errors between ranks, with and without autograd.

A model-parallel layer works on the rows of all ranks and returns to each the errors of its own
(Dettmers 2016, 2.1). Activations and errors have a codec of their own; None sends them as they are.

all_gather       rows of rank 0 | 1 | 2   on each rank   each rank's rows, encoded, to all others
reduce_scatter   sums of rows of rank r   on rank r      each rank's rows for r, encoded, to r
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
from paceline.core.errors import InvalidInput, NonFinite
from paceline.links.all_to_all import AllToAll


@dataclass
class Sent:
    """Bytes on the wire that this rank has sent and received.

    Activations travel in forward, errors in backward. 40 bytes of each message are its header.
    """

    activations_sent: int = 0
    activations_received: int = 0
    activation_gradients_sent: int = 0
    activation_gradients_received: int = 0


@dataclass(frozen=True, eq=False)
class Pending:
    """An exchange that runs in the background; `wait` returns its values, once.

    It raises NonFinite on all ranks if those of some rank were not finite.
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
    """Return the rows of all ranks, in rank order, the same bits on each.

    `x` has this rank's rows in dimension 0; `sizes` are their numbers on all ranks, exchanged if
    they are not given. In backward each rank sends the gradients of other ranks' rows to these by
    codec `activation_gradients`, and adds up what it has and gets of its own, decoded to float32,
    in rank order: the derivative of the sum of all ranks' losses. What travels by a codec must be
    float32.

    All ranks call it in the same order, and run backward through it. InvalidInput for what does
    not fit, NonFinite on all ranks with the rank whose values are NaN or infinite; `what` names
    them there. `traffic` counts the bytes. A rank alone returns x as it is.
    """
    known = _sizes(x, (codec, activation_gradients), group, sizes, what)
    form_of(activation_gradients, x.dtype)  # raises now, and not in backward
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
    """Return the sum over all ranks of the rows that belong to this one: `all_gather` turned round.

    `x` has rows for all ranks in dimension 0, as many as `sizes` says for each; by default they
    are shared as equally as possible, the first ranks having one more. They travel by `codec`, the
    gradients of the sums to all ranks by `activation_gradients`. For the rest it is as
    `all_gather`.
    """
    num_ranks = len(ranks_of(group))
    if sizes is None and x.dim():
        sizes = [len(x) // num_ranks + (rank < len(x) % num_ranks) for rank in range(num_ranks)]
    form_of(activation_gradients, x.dtype)
    forward = RowExchange(codec, group, tuple(sizes or ()), traffic, what)
    backward = forward.of_gradients(activation_gradients)
    if len(forward.sizes) == 1:
        return x
    summed: Tensor = _Exchanged.apply(x, forward.reduce_scatter, backward.all_gather)  # type: ignore[no-untyped-call]
    return summed


def begin_gather(
    values: Tensor,
    codec: str | Codec | None = None,
    group: dist.ProcessGroup | None = None,
    sizes: Sequence[int] | None = None,
    *,
    traffic: Sent | None = None,
    what: str = "activations",
) -> Pending:
    """Begin what `all_gather` does, without autograd; `values` may change before `wait`."""
    known = _sizes(values, (codec,), group, sizes, what)
    return RowExchange(codec, group, known, traffic, what).all_gather(values)


def begin_return(
    errors: Tensor,
    codec: str | Codec | None,
    group: dist.ProcessGroup | None,
    sizes: Sequence[int],
    *,
    traffic: Sent | None = None,
    what: str = "errors",
) -> Pending:
    """Begin to sum, over all ranks, the rows that belong to each rank by `sizes`.

    It is the backward of `all_gather`: `errors` has the rows of all ranks, and may change before
    `wait`.
    """
    exchange = RowExchange(codec, group, tuple(sizes), traffic, what, in_forward=False)
    return exchange.reduce_scatter(errors)


_Begin = Callable[[Tensor], Pending]


class _Exchanged(torch.autograd.Function):
    """Runs an exchange in forward, and in backward the opposite one with the gradients."""

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
    """Return the number of rows of each rank; they exchange it if it is not given."""
    ranks = ranks_of(group)
    if sizes is not None:
        return tuple(sizes)
    if values.dim() == 0:
        raise InvalidInput(what, "a single value", hint="give rows, in dimension 0")
    if len(ranks) == 1:
        return (len(values),)
    names = [form_of(codec, values.dtype).name for codec in codecs]
    kind = f"{values.dtype} rows of shape {list(values.shape[1:])}, sent by {' and '.join(names)}"
    own = torch.tensor([len(values), zlib.crc32(kind.encode())], device=values.device)
    gathered = [torch.empty_like(own) for _ in ranks]
    dist.all_gather(gathered, own, group=group)
    found = [one.tolist() for one in gathered]
    for rank, (_, checksum) in zip(ranks, found, strict=True):
        if checksum != zlib.crc32(kind.encode()):
            raise InvalidInput(
                what,
                f"rank {rank} has others than rank {dist.get_rank()}, which has {kind}",
                hint="give all ranks the same",
            )
    return tuple(count for count, _ in found)


@dataclass(frozen=True)
class RowExchange:
    """Exchanges of rows by a codec between the ranks of a group; `sizes` are their numbers of rows.

    `codec` None sends values as they are. A rank alone sends nothing, and so encodes nothing.
    `what` names the values in errors. All ranks begin their exchanges in the same order; each
    thread needs a group of its own.
    """

    codec: str | Codec | None
    group: dist.ProcessGroup | None
    sizes: tuple[int, ...]
    traffic: Sent | None = None
    what: str = "activations"
    in_forward: bool = True

    def of_gradients(self, codec: str | Codec | None) -> "RowExchange":
        """Return the exchange of the values' gradients in backward, by a codec of their own."""
        return replace(self, codec=codec, what=f"the gradient of {self.what}", in_forward=False)

    def all_gather(self, values: Tensor) -> Pending:
        """Begin to send this rank's rows to all, which get the same bits, in rank order."""
        own = self._check(values, all_rows=False)
        if len(self.sizes) == 1:
            return Pending(values.detach)
        form = form_of(self.codec, values.dtype)
        counts = [rows * values.shape[1:].numel() for rows in self.sizes]
        lengths = [row_nbytes(form.nbytes(count)) for count in counts]
        row = _row(form.encode(values), form, values)
        posted = self._post([row] * len(counts), lengths)
        shape, dtype = (sum(self.sizes), *values.shape[1:]), values.dtype

        def finish() -> Tensor:
            rows = posted.wait()
            rows[own] = row  # decoded like all others, so that every rank gets the same bits
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
        """Begin to sum all ranks' rows, each on the rank that they belong to, in rank order.

        Sums are of decoded values in float32, or float64 where it is theirs. What a rank has for
        itself does not travel, and is not encoded.
        """
        own = self._check(values, all_rows=True)
        if len(self.sizes) == 1:
            return Pending(values.detach)
        form, parts = form_of(self.codec, values.dtype), values.detach().split(list(self.sizes))
        if not values.dtype.is_floating_point:
            raise InvalidInput(
                self.what, f"of {values.dtype}", hint="sums are of floating point values"
            )
        # A copy: the caller may change `values` before it waits.
        sum_type = torch.promote_types(values.dtype, torch.float32)
        mine = parts[own].reshape(-1).to(sum_type, copy=True)
        payloads = [form.encode(part) for rank, part in enumerate(parts) if rank != own]
        own_found = len(mine) - int(mine.isfinite().sum())
        own_found += sum(payload.num_nonfinite for payload in payloads)
        # Every row has the count of all of this rank's rows, so that all ranks raise NonFinite.
        rows = [_row(replace(one, num_nonfinite=own_found), form, values) for one in payloads]
        rows.insert(own, rows[0][:0])  # nothing travels from a rank to itself
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
        """Return this rank's place in the group; InvalidInput if sizes do not fit."""
        ranks = ranks_of(self.group)
        if len(self.sizes) != len(ranks) or min(self.sizes) < 0:
            raise InvalidInput(
                "sizes",
                str(list(self.sizes)),
                hint=f"give the number of rows of each of {len(ranks)} ranks",
            )
        own = dist.get_rank(self.group) if len(ranks) > 1 else 0
        expected = sum(self.sizes) if all_rows else self.sizes[own]
        if values.dim() == 0 or len(values) != expected:
            raise InvalidInput(
                self.what,
                f"of shape {list(values.shape)}, but by sizes {list(self.sizes)} rank "
                f"{ranks[own]} has {expected} rows",
            )
        return own

    def _post(self, rows: Sequence[Tensor], lengths: Sequence[int]) -> AllToAll:
        posted, traffic = AllToAll(rows, lengths, self.group), self.traffic
        if traffic is not None and self.in_forward:
            traffic.activations_sent += posted.sent_nbytes
            traffic.activations_received += posted.received_nbytes
        elif traffic is not None:
            traffic.activation_gradients_sent += posted.sent_nbytes
            traffic.activation_gradients_received += posted.received_nbytes
        return posted

    def _check_finite(self, form: Codec, found: Sequence[int]) -> None:
        for rank, num_nonfinite in zip(ranks_of(self.group), found, strict=True):
            if num_nonfinite:
                raise NonFinite(
                    f"{self.what}: {num_nonfinite} values of rank {rank} are NaN or infinite "
                    f"as {form.name}"
                )


def _row(payload: Payload, form: Codec, values: Tensor) -> Tensor:
    """Return a payload as the row of bytes that travels, on the device of the values."""
    return pack([payload], row_nbytes(form.nbytes(payload.count)), values.device)[0]


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Return the ranks of a group, and one without torch.distributed.

    InvalidInput where ranks were started together, but would each be left alone.
    """
    if group is not None and dist.get_rank(group) < 0:
        raise InvalidInput("group", f"rank {dist.get_rank()} is not one of it")
    if dist.is_initialized():
        return dist.get_process_group_ranks(group or dist.group.WORLD)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InvalidInput("all_gather", "call torch.distributed.init_process_group before")
    return [0]


def form_of(codec: str | Codec | None, dtype: torch.dtype) -> Codec:
    """Return the codec for values of a type; InvalidInput if it needs the same rows every time."""
    if codec is None:
        return Cast(str(dtype).removeprefix("torch."), exact=True)
    if dtype != torch.float32:
        raise InvalidInput(
            "codec", f"{dtype} cannot be encoded", hint="give float32, or codec None"
        )
    form = find_codec(codec) if isinstance(codec, str) else codec
    if isinstance(form, ErrorFeedback):
        raise InvalidInput(
            "codec",
            f"{form.name!r} makes up for errors in the next values of the same tensor, and each "
            "batch has other rows",
            hint="choose one that remembers nothing, as dynamic8 or half",
        )
    if not form.fixed_size:
        raise InvalidInput(
            "codec",
            f"the bytes of {form.name!r} depend on the values",
            hint="choose one whose size is known beforehand, as dynamic8 or half",
        )
    return form
