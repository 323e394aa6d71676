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
from paceline.codecs.payload import Payload
from paceline.codecs.rows import pack, row_nbytes, unpack


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
        self._peers = [other for other in range(len(codecs)) if other != rank]
        self._received = torch.empty(0, dtype=torch.uint8)
        self._row_nbytes = 0

    def scatter(self, group: dist.ProcessGroup) -> int:
        """Send each shard to the rank that sums it; return the bytes sent."""
        payloads = [self._codecs[peer].encode(self._shards[peer]) for peer in self._peers]
        self._received = _exchanged(self._rows(payloads, group), self._peers, group)
        return len(self._peers) * self._row_nbytes

    def gather(self, group: dist.ProcessGroup) -> tuple[int, int]:
        """Make the values their means: return the bytes sent, and how many were not finite.

        These, on any rank, count as zero.
        """
        own, codec = self._shards[self._rank], self._codecs[self._rank]
        num_nonfinite = 0
        for payload in unpack(self._received, codec.name, len(own)):
            codec.add_to(own, payload)
            num_nonfinite += payload.num_nonfinite
        if self._divisor != 1.0:
            own /= self._divisor
        payload = codec.encode(own)
        sums = Payload(
            payload.codec, payload.count, payload.buffers, payload.num_nonfinite + num_nonfinite
        )
        row = self._rows([sums], group)
        received = _exchanged(row.expand(len(self._peers), -1), self._peers, group)
        codec.decode(sums, out=own)
        num_nonfinite = sums.num_nonfinite
        for row, peer in zip(received, self._peers, strict=True):
            shard, codec = self._shards[peer], self._codecs[peer]
            [payload] = unpack(row.unsqueeze(0), codec.name, len(shard))
            codec.decode(payload, out=shard)
            num_nonfinite += payload.num_nonfinite
        return len(self._peers) * self._row_nbytes, num_nonfinite

    def _rows(self, payloads: Sequence[Payload], group: dist.ProcessGroup) -> Tensor:
        """Return a row of bytes for each payload, as long as those of the other ranks."""
        self._row_nbytes = self._longest(payloads, group)
        return pack(payloads, self._row_nbytes, self.values.device)

    def _longest(self, payloads: Sequence[Payload], group: dist.ProcessGroup) -> int:
        """Return the bytes of a row: those of the longest shard, or the longest on any rank."""
        codec = self._codecs[self._rank]
        if codec.fixed_size:
            nbytes = codec.nbytes(len(self._shards[0]))
        else:
            # A rank alone scatters nothing.
            longest = max((payload.nbytes for payload in payloads), default=0)
            agreed = torch.tensor([longest], device=self.values.device)
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group=group)
            nbytes = int(agreed)
        return row_nbytes(nbytes)


def _exchanged(sent: Tensor, peers: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send each peer its row, and return theirs for this rank.

    Each receive is posted before anything is sent: gloo asks for a message on the connection on
    which it sends, so that in its own all-to-all a request waits until this rank's message has gone
    out, and the link is used in one direction at a time.
    """
    received = torch.empty_like(sent, memory_format=torch.contiguous_format)
    if sent.device.type != "cpu":
        rows = [int(rank in peers) for rank in range(dist.get_world_size(group))]
        dist.all_to_all_single(received, sent.contiguous(), rows, rows, group=group)
        return received
    pairs = list(zip(peers, received, sent, strict=True))
    posted = [dist.irecv(row, group=group, group_src=peer) for peer, row, _ in pairs]
    posted += [dist.isend(row, group=group, group_dst=peer) for peer, _, row in pairs]
    for work in posted:
        assert work is not None  # this rank is one of the group
        work.wait()
    return received
