"""Error feedback, and the codecs `OneBit` and `Threshold`, which need error feedback."""

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.codecs.codec import Codec, Payload, as_type, finite, flat, num_nonfinite
from paceline.codecs.quantization import in_blocks
from paceline.core.errors import InvalidInput

_BITS = 8
_WORD_NBYTES = 4
_SIGN = 1 << 31  # sign bit of a word; the other bits are the index of a value


class ErrorFeedback:
    """Wraps a codec, and adds the last encoding error of a tensor to the next values.

    The method is that of Seide et al. 2014. Use one instance for each tensor, whose size must not
    change. For NaN and infinite values the error is zero. The wrapped codec decodes the payloads.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.name, self.fixed_size, self.nbytes = codec.name, codec.fixed_size, codec.nbytes
        self.encodes_sums = codec.encodes_sums
        self.decode, self.add_to = codec.decode, codec.add_to
        self._error: Tensor | None = None

    def encode(self, values: Tensor) -> Payload:
        """Encode the values plus the last encoding error, and keep the new error."""
        values = flat(values)
        if self._error is not None:
            if self._error.shape != values.shape:
                problem = f"must have {len(self._error)} elements, as in earlier calls"
                hint = "create an ErrorFeedback for each tensor"
                raise InvalidInput("values", problem, got=len(values), hint=hint)
            # Do not add in place, because `values` are the caller's gradients.
            values = values + self._error
        payload = self.codec.encode(values)
        # Replace NaN by zero, because a NaN would remain in the error forever.
        self._error = torch.nan_to_num(values - self.codec.decode(payload), 0.0, 0.0, 0.0)
        return payload

    @property
    def sent_share(self) -> float | None:
        """The share of values that a `Threshold` codec has sent so far; None for other codecs."""
        return self.codec.sent.share if isinstance(self.codec, Threshold) else None

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the error, for a checkpoint."""
        return {} if self._error is None else {"error": self._error.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the error from `state`, which `state_dict` returned."""
        error = state.get("error")
        self._error = None if error is None else error.clone()


@dataclass(frozen=True)
class OneBit(Codec):
    """Encodes each value in one bit, its sign (Seide et al. 2014).

    For each block, a payload also has two float32 means: of the block's negative values, and of its
    other values. Each value is decoded as the mean for its sign, which minimises the squared error.
    Use this codec only inside `ErrorFeedback`.
    """

    block_size: int = 1024

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise InvalidInput("block_size", "must be at least 1", got=self.block_size)

    @property
    def name(self) -> str:
        """The name and the block size, on which sender and receiver must agree."""
        return f"onebit/{self.block_size}"

    def encode(self, values: Tensor) -> Payload:
        """Encode float32 values; NaN and infinite values become zero, and are counted."""
        values = flat(values)
        num_lost, values = num_nonfinite(values), finite(values)
        is_negative = values < 0
        means = []
        for chosen in (~is_negative, is_negative):
            own = in_blocks(torch.where(chosen, values, 0.0), self.block_size)
            counts = in_blocks(chosen.float(), self.block_size).sum(1)
            # Sum in float64, because a float32 sum of large values could overflow.
            means.append((own.sum(1, dtype=torch.float64) / counts.clamp_min(1)).float())
        # Pack eight signs into a byte, the first sign into the lowest bit.
        weights = torch.tensor([1 << bit for bit in range(_BITS)], device=values.device)
        packed = (in_blocks(is_negative.long(), _BITS) * weights).sum(1).to(torch.uint8)
        buffers = torch.stack(means, 1).flatten().view(torch.uint8), packed
        return Payload(self.name, len(values), buffers, num_lost)

    def decode(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        """Decode a payload to float32 values [count]; write them into `out` if given."""
        count = payload.count
        payload.check(self.name, self._sizes(count))
        means = as_type(payload.buffers[0], torch.float32).view(-1, 2)
        bits = torch.arange(_BITS, device=means.device, dtype=torch.uint8)
        is_bit_set = payload.buffers[1].unsqueeze(1).bitwise_right_shift(bits) & 1
        # Repeat a block's means for each of its values; the last block may be shorter.
        of_block = means.repeat_interleave(self.block_size, 0)[:count]
        is_negative = is_bit_set.flatten()[:count].bool()
        values = torch.where(is_negative, of_block[:, 1], of_block[:, 0])
        return payload.target(out).copy_(values)

    def nbytes(self, count: int) -> int:
        """Return the payload size in bytes for `count` values."""
        return sum(self._sizes(count))

    def _sizes(self, count: int) -> tuple[int, int]:
        """Return the size of each buffer in bytes: two means per block, then the signs."""
        return 8 * -(-count // self.block_size), -(-count // _BITS)


class SentCount:
    """Counts encoded values, and how many of them were sent; safe for concurrent threads."""

    def __init__(self) -> None:
        self._num_sent = self._num_values = 0
        self._adding = threading.Lock()

    def add(self, num_sent: int, num_values: int) -> None:
        """Add the counts of one payload."""
        with self._adding:
            self._num_sent += num_sent
            self._num_values += num_values

    @property
    def share(self) -> float | None:
        """The share of the encoded values that were sent; None if no values were encoded."""
        return self._num_sent / self._num_values if self._num_values else None


@dataclass(frozen=True)
class Threshold(Codec):
    """Sends plus or minus `tau` for each value above `tau` in magnitude (Strom 2015).

    A sent value takes four bytes; other values are not sent. Use this codec only inside
    `ErrorFeedback`, which adds an element's encoding error to its next value. If an element's
    values are at most `tau` in magnitude, so is its error. If they stay above `tau`, the error
    grows without limit, because each step sends only `tau`.
    """

    tau: float
    sent: SentCount = field(default_factory=SentCount, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.tau < float("inf"):
            raise InvalidInput("tau", "must be a positive number", got=self.tau)

    @property
    def name(self) -> str:
        """The codec's name; it omits tau, which each payload contains."""
        return "threshold"

    @property
    def fixed_size(self) -> bool:
        """False, because the payload size depends on the number of values sent."""
        return False

    def encode(self, values: Tensor) -> Payload:
        """Encode float32 values; NaN and infinite values become zero, and are counted."""
        values = flat(values)
        if len(values) > _SIGN:
            raise InvalidInput("values", f"must have at most {_SIGN:,} elements", got=len(values))
        places = ((values.abs() > self.tau) & values.isfinite()).nonzero().flatten()
        # A word is a value's index. For negative values, subtracting 2^31 also sets the top bit.
        words = places - _SIGN * (values[places] < 0)
        self.sent.add(len(places), len(values))
        tau = torch.tensor([self.tau], device=values.device)
        buffers = tau.view(torch.uint8), words.to(torch.int32).view(torch.uint8)
        return Payload(self.name, len(values), buffers, num_nonfinite(values))

    def decode(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        """Decode a payload to float32 values [count]; write them into `out` if given."""
        self._check(payload)
        values = payload.target(out).zero_()
        self.add_to(values, payload)
        return values

    def add_to(self, total: Tensor, payload: Payload) -> None:
        """Add a payload's decoded values to `total`, a float32 tensor [count]."""
        self._check(payload)
        payload.check_target(total)
        tau = as_type(payload.buffers[0], torch.float32)
        words = as_type(payload.buffers[1], torch.int32)
        places = words.long() & (_SIGN - 1)
        if len(places) and int(places.max()) >= payload.count:
            raise InvalidInput("payload", f"has an index beyond its {payload.count} values")
        # Indices are unique, so the order of these additions does not matter.
        total.index_add_(0, places, torch.where(words < 0, -tau, tau))

    def nbytes(self, count: int) -> int:
        """Return the maximum payload size in bytes, which is needed if all values are sent."""
        return _WORD_NBYTES * (1 + count)

    def _check(self, payload: Payload) -> None:
        num_words = sum(buffer.numel() for buffer in payload.buffers[1:]) // _WORD_NBYTES
        payload.check(self.name, (_WORD_NBYTES, _WORD_NBYTES * num_words))
        if payload.count > _SIGN:
            raise InvalidInput("payload", f"must have at most {_SIGN:,} values", got=payload.count)
