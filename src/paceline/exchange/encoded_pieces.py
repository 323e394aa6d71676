"""Sum a piece of values over all ranks with encoded messages.

A codec that encodes sums (`Codec.encodes_sums`) uses `ShardedPiece`; each rank sums one shard:

    values     [shard 0 | shard 1 | shard 2]        on each rank
    scatter     encode, all-to-all                  each shard to the rank that sums it
    gather      decode and add, encode, all-gather  each sum to all ranks, decode

Other codecs use `WholePiece`; each rank sums everything:

    values     [           whole           ]        on each rank
    scatter     encode, all-to-all                  each rank's values to all others
    gather      decode and add, in rank order       nothing is sent

A message is a row of bytes: a header and the payload's buffers. With b bytes per value each of n
ranks sends 2 (n - 1) / n * b for shards, and (n - 1) * b for wholes: two ranks send b in both
cases, and wholes round each value once. Four bits on shards would round sums, too; sums in eight
bits or float32 would make two ranks send 0.75 or 2.25 bytes per value instead of 0.5. With three
ranks both send 1.0; with more, shards with 8-bit sums would send less.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.codecs.codec import Codec, Payload, pack, row_nbytes, unpack
from paceline.links.all_to_all import post_pairs


class EncodedPiece(Protocol):
    """Contiguous float32 values to replace by their sum over all ranks / `divisor`."""

    def scatter(self, group: dist.ProcessGroup) -> int:
        """Send this rank's values; return the bytes sent."""

    def gather(self, group: dist.ProcessGroup) -> tuple[int, int]:
        """Replace values by their means; return bytes sent, and the number of non-finite values.

        Those count as zero, on whichever rank they were.
        """


def encoded_piece(
    values: Tensor, codecs: Sequence[Codec], rank: int, divisor: float = 1.0
) -> EncodedPiece:
    """Create the piece for codecs of one kind, one for each rank."""
    if codecs[rank].encodes_sums:
        return ShardedPiece(values, codecs, rank, divisor)
    return WholePiece(values, codecs[rank], rank, len(codecs), divisor)


class ShardedPiece:
    """A piece of which each rank sums one shard.

    `codecs`: one for each shard; that of the rank's own shard encodes the sum.
    """

    def __init__(
        self, values: Tensor, codecs: Sequence[Codec], rank: int, divisor: float = 1.0
    ) -> None:
        self.values, self._codecs, self._rank, self._divisor = values, codecs, rank, divisor
        # all ranks compute the same sizes, so sizes need not be sent
        size = -(-len(values) // len(codecs))
        self._shards = [values[size * i : size * (i + 1)] for i in range(len(codecs))]
        self._peers = [other for other in range(len(codecs)) if other != rank]
        self._received = torch.empty(0, dtype=torch.uint8)

    def scatter(self, group: dist.ProcessGroup) -> int:
        """Send each shard to the rank that sums it; return the bytes sent."""
        payloads = [self._codecs[peer].encode(self._shards[peer]) for peer in self._peers]
        rows = self._rows(payloads, group)
        self._received = _exchanged(rows, self._peers, group)
        return rows.numel()

    def gather(self, group: dist.ProcessGroup) -> tuple[int, int]:
        """Replace values by their means; return bytes sent, and the number of non-finite values.

        Those count as zero, on whichever rank they were.
        """
        own, codec = self._shards[self._rank], self._codecs[self._rank]
        num_nonfinite = 0
        for payload in unpack(self._received, codec.name, len(own)):
            codec.add_to(own, payload)
            num_nonfinite += payload.num_nonfinite
        if self._divisor != 1.0:
            own /= self._divisor
        sums = codec.encode(own)
        num_nonfinite += sums.num_nonfinite
        # Tell all ranks the number of non-finite values.
        sums = replace(sums, num_nonfinite=num_nonfinite)
        row = self._rows([sums], group)
        received = _exchanged(row.expand(len(self._peers), -1), self._peers, group)
        sent = len(self._peers) * row.shape[1]
        # The owner decodes its own sum, too, so that all ranks get the same bits.
        codec.decode(sums, out=own)
        for row, peer in zip(received, self._peers, strict=True):
            shard, codec = self._shards[peer], self._codecs[peer]
            [payload] = unpack(row.unsqueeze(0), codec.name, len(shard))
            codec.decode(payload, out=shard)
            num_nonfinite += payload.num_nonfinite
        return sent, num_nonfinite

    def _rows(self, payloads: Sequence[Payload], group: dist.ProcessGroup) -> Tensor:
        codec, count = self._codecs[self._rank], len(self._shards[0])
        return _rows(payloads, codec, count, self.values.device, group)


class WholePiece:
    """A piece that each rank sums completely, from every rank's encoded values.

    All ranks treat values that are not finite as zero, and count them.
    """

    def __init__(
        self, values: Tensor, codec: Codec, rank: int, num_ranks: int, divisor: float = 1.0
    ) -> None:
        self.values, self._codec, self._rank, self._divisor = values, codec, rank, divisor
        self._peers = [other for other in range(num_ranks) if other != rank]
        self._payloads: list[Payload] = []

    def scatter(self, group: dist.ProcessGroup) -> int:
        """Send the encoded values to all other ranks; return the bytes sent."""
        own = self._codec.encode(self.values)
        row = _rows([own], self._codec, len(self.values), self.values.device, group)
        received = _exchanged(row.expand(len(self._peers), -1), self._peers, group)
        self._payloads = unpack(received, self._codec.name, len(self.values))
        self._payloads.insert(self._rank, own)
        return len(self._peers) * row.shape[1]

    def gather(self, group: dist.ProcessGroup) -> tuple[int, int]:
        """Replace values by the mean of decoded values; return 0 and the non-finite count."""
        # In rank order, with this rank's rounded values, so that all ranks get the same bits.
        first, *others = self._payloads
        self._codec.decode(first, out=self.values)
        for payload in others:
            self._codec.add_to(self.values, payload)
        if self._divisor != 1.0:
            self.values /= self._divisor
        return 0, sum(payload.num_nonfinite for payload in self._payloads)


def _rows(
    payloads: Sequence[Payload],
    codec: Codec,
    count: int,
    device: torch.device,
    group: dist.ProcessGroup,
) -> Tensor:
    """Return rows of bytes of equal length for payloads of at most `count` values."""
    if codec.fixed_size:
        nbytes = codec.nbytes(count)
    else:
        # a single rank scatters nothing
        longest = max((payload.nbytes for payload in payloads), default=0)
        agreed = torch.tensor([longest], device=device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=group)
        nbytes = int(agreed)
    return pack(payloads, row_nbytes(nbytes), device)


def _exchanged(sent: Tensor, peers: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Exchange rows with all peers."""
    received = torch.empty_like(sent, memory_format=torch.contiguous_format)
    if sent.device.type != "cpu":
        rows = [int(rank in peers) for rank in range(dist.get_world_size(group))]
        dist.all_to_all_single(received, sent.contiguous(), rows, rows, group=group)
        return received
    for work in post_pairs(received, sent, peers, group):
        assert work is not None  # this rank is a member
        work.wait()
    return received
