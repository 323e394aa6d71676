"""Rows of all ranks on each of them, and sums of all ranks' rows on the one that they belong to.

gather   rows of rank 0 | 1 | 2   on each rank     what each has, encoded, to all others
give     sums of rows of rank r   on rank r        what each has for another, encoded, to that
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.codecs.codec import Codec
from paceline.codecs.feedback import ErrorFeedback
from paceline.codecs.names import find_codec
from paceline.codecs.plain import Plain
from paceline.codecs.rows import pack, row_nbytes, unpack
from paceline.core.errors import InvalidInput, NonFinite
from paceline.links.pairwise import Posted


@dataclass
class Sent:
    """Bytes that this rank has handed to the others, and those that it got: what is on the wire.

    Activations are what travels in forward, errors what travels in backward. Of each message 40
    bytes are its header.
    """

    activations_sent: int = 0
    activations_received: int = 0
    errors_sent: int = 0
    errors_received: int = 0

    def count(self, in_forward: bool, sent: int, received: int) -> None:
        """Add what was sent and received."""
        if in_forward:
            self.activations_sent += sent
            self.activations_received += received
        else:
            self.errors_sent += sent
            self.errors_received += received


@dataclass(frozen=True, eq=False)
class Pending:
    """An exchange that is under way beside what its caller does meanwhile."""

    _finish: Callable[[], Tensor]

    def wait(self) -> Tensor:
        """Return its values, once. NonFinite on all ranks if those of some rank were not finite."""
        return self._finish()


@dataclass(frozen=True)
class Between:
    """How rows travel: by which codec, between whom, and how many of them each rank has.

    `codec` None sends values as they are. A rank alone sends nothing, and so encodes nothing.
    `what` names the values in errors. All ranks begin their exchanges in the same order; those of
    several threads need a group for each.
    """

    codec: str | Codec | None
    group: dist.ProcessGroup | None
    sizes: tuple[int, ...]
    traffic: Sent | None = None
    what: str = "activations"
    in_forward: bool = True

    def gather(self, values: Tensor) -> Pending:
        """Begin to send this rank's rows to all, which get the same bits, in rank order."""
        own = self._check(values, gives=False)
        if len(self.sizes) == 1:
            return Pending(values.detach)
        form = form_of(self.codec, values.dtype)
        counts = [rows * values.shape[1:].numel() for rows in self.sizes]
        lengths = [row_nbytes(form.nbytes(count)) for count in counts]
        row = pack([form.encode(values)], lengths[own], values.device)[0]
        posted = self._post([row] * len(counts), lengths)
        shape, dtype = (sum(self.sizes), *values.shape[1:]), values.dtype

        def finish() -> Tensor:
            rows = posted.wait()
            rows[own] = row
            whole = torch.empty(sum(counts), dtype=dtype, device=row.device)
            found = []
            for one, part in zip(rows, whole.split(counts), strict=True):
                [payload] = unpack(one.unsqueeze(0), form.name, len(part))
                form.decode(payload, out=part)
                found.append(payload.num_nonfinite)
            self._check_finite(form, found)
            return whole.view(shape)

        return Pending(finish)

    def give(self, values: Tensor) -> Pending:
        """Begin to sum all ranks' rows, each on the rank that they belong to, in rank order.

        Sums are of decoded values in float32, or float64 where it is theirs. What a rank has for
        itself does not travel, and is not encoded.
        """
        own = self._check(values, gives=True)
        if len(self.sizes) == 1:
            return Pending(values.detach)
        form, parts = form_of(self.codec, values.dtype), values.detach().split(list(self.sizes))
        mine = parts[own].reshape(-1).to(self._sum_type(values), copy=True)
        payloads = [form.encode(part) for rank, part in enumerate(parts) if rank != own]
        own_found = len(mine) - int(mine.isfinite().sum())
        own_found += sum(payload.num_nonfinite for payload in payloads)
        rows = []
        for payload in payloads:  # each tells its rank what there is in all of them
            told, nbytes = replace(payload, num_nonfinite=own_found), form.nbytes(payload.count)
            rows.append(pack([told], row_nbytes(nbytes), values.device)[0])
        rows.insert(own, rows[0][:0])
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

    def _check(self, values: Tensor, gives: bool) -> int:
        """Return this rank's place in the group; InvalidInput if sizes do not fit."""
        ranks = ranks_of(self.group)
        if len(self.sizes) != len(ranks) or min(self.sizes) < 0:
            raise InvalidInput(
                f"sizes: {list(self.sizes)}; give the number of rows of each of {len(ranks)} ranks"
            )
        own = dist.get_rank(self.group) if len(ranks) > 1 else 0
        expected = sum(self.sizes) if gives else self.sizes[own]
        if values.dim() == 0 or len(values) != expected:
            raise InvalidInput(
                f"{self.what}: of shape {list(values.shape)}, but by sizes {list(self.sizes)} "
                f"rank {ranks[own]} has {expected} rows"
            )
        return own

    def _sum_type(self, values: Tensor) -> torch.dtype:
        if not values.dtype.is_floating_point:
            raise InvalidInput(f"{self.what}: of {values.dtype}; sums are of floating point values")
        return torch.promote_types(values.dtype, torch.float32)

    def _post(self, rows: Sequence[Tensor], lengths: Sequence[int]) -> Posted:
        posted = Posted(rows, lengths, self.group)
        if self.traffic is not None:
            self.traffic.count(self.in_forward, posted.sent_nbytes, posted.received_nbytes)
        return posted

    def _check_finite(self, form: Codec, found: Sequence[int]) -> None:
        for rank, num_nonfinite in zip(ranks_of(self.group), found, strict=True):
            if num_nonfinite:
                raise NonFinite(
                    f"{self.what}: {num_nonfinite} values of rank {rank} are NaN or infinite "
                    f"as {form.name}"
                )


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Return the ranks of a group, and one without torch.distributed."""
    if not dist.is_initialized():
        return [0]
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def form_of(codec: str | Codec | None, dtype: torch.dtype) -> Codec:
    """Return what encodes values of a type; InvalidInput if it is not for rows that come and go."""
    if codec is None:
        return Plain(dtype)
    if dtype != torch.float32:
        raise InvalidInput(f"codec: {dtype} cannot be encoded; give float32, or codec None")
    form = find_codec(codec) if isinstance(codec, str) else codec
    if isinstance(form, ErrorFeedback):
        raise InvalidInput(
            f"codec: {form.name!r} makes up for errors in the next values of the same tensor, and "
            "each batch has other rows; choose one that remembers nothing, as dynamic8 or half"
        )
    if not form.fixed_size:
        raise InvalidInput(
            f"codec: the bytes of {form.name!r} depend on the values; choose one whose size is "
            "known beforehand, as dynamic8 or half"
        )
    return form
