"""Sum a piece of a tensor over all ranks, with encoded (compressed) messages.

A codec that encodes sums (`Codec.encodes_sums`) uses `ShardedPiece`; each rank sums one shard:

    values     [shard 0 | shard 1 | shard 2]        on each rank
    scatter     encode, all-to-all                  each shard to the rank that sums it
    gather      decode and add, encode, all-gather  each sum to all ranks, which decode it

Other codecs use `WholePiece`; each rank sums everything:

    values     [           whole           ]        on each rank
    scatter     encode, all-to-all                  each rank's values to all others
    gather      decode and add, in rank order       nothing is sent

A message is a row of bytes: a header, and the buffers of the encoded values.

With n ranks and b bytes per encoded value, a rank sends 2 (n - 1) / n * b bytes per value of a
sharded piece, and (n - 1) * b bytes per value of a whole piece. Codecs of four bits (b = 0.5) use
whole pieces, because a sharded piece would also round the sums to four bits. A sharded piece with
sums of eight bits would send fewer bytes than a whole piece, but only for n > 3.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.codecs.codec import Codec, Payload, pack, row_nbytes, unpack
from paceline.codecs.feedback import ErrorFeedback
from paceline.links.all_to_all import post_pairs


class PieceCodecs:
    """Stores one codec for each tensor key, piece and shard, each with its own error feedback."""

    def __init__(self) -> None:
        self._codecs: dict[tuple[str, int, int], Codec] = {}
        # loaded error feedback of codecs that `of` has not created yet
        self._loaded: dict[str, Tensor] = {}

    def of(self, key: str, piece: int, num_shards: int, make: Callable[[], Codec]) -> list[Codec]:
        """Return a codec per shard of a tensor's piece; `make` creates those that are missing."""
        places = [(key, piece, shard) for shard in range(num_shards)]
        for place in places:
            if place not in self._codecs:
                codec = self._codecs[place] = make()
                error = self._loaded.pop("/".join(map(str, place)), None)
                if error is not None and isinstance(codec, ErrorFeedback):
                    codec.load_state_dict({"error": error})
        return [self._codecs[place] for place in places]

    def keep(self, keys: Container[str]) -> None:
        """Drop the codecs of all keys that are not in `keys`."""
        self._codecs = {at: codec for at, codec in self._codecs.items() if at[0] in keys}

    @property
    def sent_share(self) -> float | None:
        """The fraction of values that this rank sends; None if the codec sends all values."""
        found = next(iter(self._codecs.values()), None)
        return found.sent_share if isinstance(found, ErrorFeedback) else None

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's error feedback, by "KEY/PIECE/SHARD"."""
        state = dict(self._loaded)
        for place, codec in self._codecs.items():
            for error in codec.state_dict().values() if isinstance(codec, ErrorFeedback) else ():
                state["/".join(map(str, place))] = error
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load error feedback from `state_dict`; rank and number of ranks must be unchanged."""
        self._codecs, self._loaded = {}, dict(state)


class _Piece:
    """Contiguous float32 values, to be replaced by (their sum over all ranks) / `divisor`.

    NaN and infinite values count as zero. `codecs`: as many as ranks. A sharded piece uses
    `codecs[i]` for shard i, and a whole piece uses only `codecs[rank]`.
    """

    def __init__(self, values: Tensor, codecs: Sequence[Codec], rank: int, divisor: float) -> None:
        self.values, self._codecs, self._rank, self._divisor = values, codecs, rank, divisor
        self._codec = codecs[rank]
        self._peers = [other for other in range(len(codecs)) if other != rank]

    def _rows(self, payloads: Sequence[Payload], count: int, group: dist.ProcessGroup) -> Tensor:
        """Pack each payload (at most `count` encoded values) into a row of bytes.

        Rows have equal lengths on all ranks. If the codec's encoded size varies, all ranks must
        call this, to agree on the length.
        """
        if self._codec.fixed_size:
            nbytes = self._codec.nbytes(count)
        else:
            # default=0: a single rank has no payloads to send
            longest = max((payload.nbytes for payload in payloads), default=0)
            agreed = torch.tensor([longest], device=self.values.device)
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group=group)
            nbytes = int(agreed)
        return pack(payloads, row_nbytes(nbytes), self.values.device)

    def _exchange(self, sent: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Send one row of `sent` to each other rank; return one row from each."""
        received = torch.empty_like(sent, memory_format=torch.contiguous_format)
        if sent.device.type != "cpu":
            rows = [int(rank != self._rank) for rank in range(len(self._codecs))]
            dist.all_to_all_single(received, sent.contiguous(), rows, rows, group=group)
            return received
        for work in post_pairs(received, sent, self._peers, group):
            assert work is not None  # None only for a rank outside the group
            work.wait()
        return received


class ShardedPiece(_Piece):
    """A piece of which each rank sums one shard, and sends the sum to all ranks."""

    _shards: Sequence[Tensor] = ()
    _received: Tensor

    def scatter(self, group: dist.ProcessGroup) -> int:
        """Send each shard to the rank that sums it; return the number of bytes sent."""
        # shard sizes need not be sent, because all ranks compute the same sizes
        num_shards = len(self._codecs)
        size = -(-len(self.values) // num_shards)
        self._shards = [self.values[size * i : size * (i + 1)] for i in range(num_shards)]
        payloads = [self._codecs[peer].encode(self._shards[peer]) for peer in self._peers]
        rows = self._rows(payloads, len(self._shards[0]), group)
        self._received = self._exchange(rows, group)
        return rows.numel()

    def gather(self, group: dist.ProcessGroup) -> tuple[int, int]:
        """Sum this rank's shard, send the sum to all ranks, and receive the other shards' sums.

        Returns the number of bytes sent, and the number of NaN and infinite values of all ranks.
        """
        own, codec = self._shards[self._rank], self._codec
        num_nonfinite = 0
        for payload in unpack(self._received, codec.name, len(own)):
            codec.add_to(own, payload)
            num_nonfinite += payload.num_nonfinite
        if self._divisor != 1.0:
            own /= self._divisor
        sums = codec.encode(own)
        num_nonfinite += sums.num_nonfinite
        # the message header tells the other ranks how many values of this shard were non-finite
        sums = replace(sums, num_nonfinite=num_nonfinite)
        row = self._rows([sums], len(self._shards[0]), group)
        received = self._exchange(row.expand(len(self._peers), -1), group)
        sent = len(self._peers) * row.shape[1]
        # decode this rank's own sum, too, so that it has the same rounding on all ranks
        codec.decode(sums, out=own)
        for row, peer in zip(received, self._peers, strict=True):
            shard, codec = self._shards[peer], self._codecs[peer]
            [payload] = unpack(row.unsqueeze(0), codec.name, len(shard))
            codec.decode(payload, out=shard)
            num_nonfinite += payload.num_nonfinite
        return sent, num_nonfinite


class WholePiece(_Piece):
    """A piece of which each rank receives and sums all values of all ranks."""

    _payloads: Sequence[Payload] = ()

    def scatter(self, group: dist.ProcessGroup) -> int:
        """Send the encoded values to all other ranks; return the number of bytes sent."""
        own = self._codec.encode(self.values)
        row = self._rows([own], len(self.values), group)
        received = self._exchange(row.expand(len(self._peers), -1), group)
        payloads = unpack(received, self._codec.name, len(self.values))
        # All ranks add the same encoded values in the same order, so results are bit-identical.
        self._payloads = [*payloads[: self._rank], own, *payloads[self._rank :]]
        return len(self._peers) * row.shape[1]

    def gather(self, group: dist.ProcessGroup) -> tuple[int, int]:
        """Replace the values by the decoded values' sum / `divisor`; nothing is sent.

        Returns 0 bytes sent, and the number of NaN and infinite values of all ranks.
        """
        first, *others = self._payloads
        self._codec.decode(first, out=self.values)
        for payload in others:
            self._codec.add_to(self.values, payload)
        if self._divisor != 1.0:
            self.values /= self._divisor
        return 0, sum(payload.num_nonfinite for payload in self._payloads)


EncodedPiece = ShardedPiece | WholePiece


def encoded_piece(
    values: Tensor, codecs: Sequence[Codec], rank: int, divisor: float
) -> EncodedPiece:
    """Create a ShardedPiece if the codecs encode sums, otherwise a WholePiece."""
    kind: type[EncodedPiece] = ShardedPiece if codecs[rank].encodes_sums else WholePiece
    return kind(values, codecs, rank, divisor)
