"""One piece of an all-reduce whose values travel encoded: each rank sums a shard of it.

    values     [shard 0 | shard 1 | shard 2]        on each rank
    scatter     encode, all-to-all                  each shard to the rank that sums it
    gather      decode and add, encode, all-gather  each sum to all ranks, decode

What is sent is a row of bytes for each shard: a header, and the buffers of its payload.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.codecs.codec import Codec
from paceline.codecs.payload import MOST_BUFFERS, Payload
from paceline.core.errors import InvalidInput

# int64: values that were not finite, number of buffers, bytes of each
_HEADER = 2 + MOST_BUFFERS
_HEADER_NBYTES = 8 * _HEADER


class Piece:
    """Values of this rank, float32 and contiguous, which become their sum over all divided.

    `codecs` are one for each shard; that of a rank's own shard encodes its sum.
    """

    def __init__(
        self, values: Tensor, codecs: Sequence[Codec], rank: int, divisor: float = 1.0
    ) -> None:
        self.values, self._codecs, self._rank, self._divisor = values, codecs, rank, divisor
        size = -(-len(values) // len(codecs))
        self._shards = [values[size * i : size * (i + 1)] for i in range(len(codecs))]
        self._received = torch.empty(0, dtype=torch.uint8)
        self._row_nbytes = 0

    def scatter(self, group: dist.ProcessGroup) -> int:
        """Send each shard to the rank that sums it; return the bytes sent."""
        payloads = [
            None if rank == self._rank else codec.encode(shard)
            for rank, (codec, shard) in enumerate(zip(self._codecs, self._shards, strict=True))
        ]
        sent = self._rows(payloads, group)
        self._received = _all_to_all(sent, group)
        return (len(self._codecs) - 1) * self._row_nbytes

    def gather(self, group: dist.ProcessGroup) -> tuple[int, int]:
        """Make the values their means: return the bytes sent, and how many were not finite.

        These, on any rank, count as zero.
        """
        own, codec = self._shards[self._rank], self._codecs[self._rank]
        num_nonfinite = 0
        for rank, payload in enumerate(self._payloads(self._received, codec, len(own))):
            if rank != self._rank:
                codec.add_to(own, payload)
                num_nonfinite += payload.num_nonfinite
        if self._divisor != 1.0:
            own /= self._divisor
        payload = codec.encode(own)
        sums = Payload(
            payload.codec, payload.count, payload.buffers, payload.num_nonfinite + num_nonfinite
        )
        row = self._rows([sums], group)
        rows = _all_to_all(row.expand(len(self._codecs), -1), group)
        return (len(self._codecs) - 1) * self._row_nbytes, self._take(rows)

    def _take(self, rows: Tensor) -> int:
        """Decode the sums of all ranks, and return how many values were not finite."""
        num_nonfinite = 0
        for row, codec, shard in zip(rows, self._codecs, self._shards, strict=True):
            [payload] = self._payloads(row.unsqueeze(0), codec, len(shard))
            codec.decode(payload, out=shard)
            num_nonfinite += payload.num_nonfinite
        return num_nonfinite

    def _rows(self, payloads: Sequence[Payload | None], group: dist.ProcessGroup) -> Tensor:
        """Return a row of bytes for each payload, as long as those of the other ranks."""
        self._row_nbytes = self._longest(payloads, group)
        device = self.values.device
        rows = torch.empty(len(payloads), self._row_nbytes, dtype=torch.uint8, device=device)
        headers = torch.zeros(len(payloads), _HEADER, dtype=torch.int64)
        for row, header, payload in zip(rows, headers, payloads, strict=True):
            if payload is None:
                continue
            sizes = [buffer.numel() for buffer in payload.buffers]
            facts = [payload.num_nonfinite, len(sizes), *sizes]
            header[: len(facts)] = torch.tensor(facts)
            parts = row[_HEADER_NBYTES : _HEADER_NBYTES + sum(sizes)].split(sizes)
            for part, buffer in zip(parts, payload.buffers, strict=True):
                part.copy_(buffer)
        rows[:, :_HEADER_NBYTES] = headers.view(torch.uint8).to(device)
        return rows

    def _longest(self, payloads: Sequence[Payload | None], group: dist.ProcessGroup) -> int:
        """Return the bytes of a row: those of the longest shard, or the longest on any rank."""
        codec = self._codecs[self._rank]
        if codec.fixed_size:
            nbytes = codec.nbytes(len(self._shards[0]))
        else:
            sizes = [payload.nbytes for payload in payloads if payload is not None]
            longest = max(sizes, default=0)  # a rank alone scatters nothing
            agreed = torch.tensor([longest], device=self.values.device)
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group=group)
            nbytes = int(agreed)
        return _HEADER_NBYTES + -(-nbytes // 8) * 8  # each row begins on a whole int64

    def _payloads(self, rows: Tensor, codec: Codec, count: int) -> list[Payload]:
        """Return what rows carry; InvalidInput if it is more than they hold."""
        headers = rows[:, :_HEADER_NBYTES].contiguous().cpu().view(torch.int64).tolist()
        payloads = []
        for row, (num_nonfinite, num_buffers, *all_sizes) in zip(rows, headers, strict=True):
            sizes = all_sizes[: max(0, num_buffers)]
            if min(sizes, default=0) < 0 or _HEADER_NBYTES + sum(sizes) > len(row):
                raise InvalidInput(
                    f"a row of {len(row)} bytes speaks of buffers of {sizes} bytes: do all ranks "
                    "use the same codec?"
                )
            parts = row[_HEADER_NBYTES : _HEADER_NBYTES + sum(sizes)].split(sizes)
            payloads.append(Payload(codec.name, count, tuple(parts), num_nonfinite))
        return payloads


def _all_to_all(sent: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send each rank its row, and return those of all ranks for this one.

    Each receive is posted before anything is sent: gloo asks for a message on the connection on
    which it sends, so that in its own all-to-all a request waits until this rank's message has gone
    out, and the link is used in one direction at a time.
    """
    received = torch.empty_like(sent, memory_format=torch.contiguous_format)
    if sent.device.type != "cpu":
        dist.all_to_all_single(received, sent.contiguous(), group=group)
        return received
    own = dist.get_rank(group)
    peers = [rank for rank in range(len(sent)) if rank != own]
    posted = [dist.irecv(received[rank], group=group, group_src=rank) for rank in peers]
    posted += [dist.isend(sent[rank], group=group, group_dst=rank) for rank in peers]
    received[own] = sent[own]
    for work in posted:
        assert work is not None  # this rank is one of the group
        work.wait()
    return received
