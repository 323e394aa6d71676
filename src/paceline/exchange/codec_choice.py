"""Choose the codec of each exchange: the requested codec, or the fastest by measurements."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from paceline.codecs.codec import Cast, Codec
from paceline.codecs.feedback import ErrorFeedback
from paceline.codecs.names import factory_of, find_codec
from paceline.core.durations import duration
from paceline.core.errors import InvalidInput
from paceline.core.link_fit import ExchangeSample, LinearTime, line_through
from paceline.core.turns import Choice
from paceline.core.wire_format import AUTO, wire_format
from paceline.exchange.compressed import CompressedAllReduce, Work

Factory = Callable[[], Codec]

_CODEC = wire_format(AUTO).name  # plans use this codec for "auto", too
_FACTORIES: dict[str, Factory] = {
    "plain": partial(Cast, "float32"),
    "encoded": partial(find_codec, _CODEC),
}
_SIZES = (1 << 10, 1 << 21)  # number of values of a small and a large exchange
_NUM_MEASURED = 3
_WORTH = 0.98  # encode if (time with codec) / (time without codec) is below this value


class CodecChoice:
    """Uses one codec for all tensors; a subclass may choose a codec by a tensor's size.

    All ranks choose the same codec.
    """

    def __init__(self, factory: Factory) -> None:
        self._factory, self._first = factory, factory()
        self._name = self._first.name

    @property
    def sent_share(self) -> float | None:
        """The share of values that this rank sends; None if the codec omits no values."""
        return self._first.sent_share if isinstance(self._first, ErrorFeedback) else None

    @property
    def is_plain(self) -> bool:
        """Whether nothing is encoded in this step."""
        return False

    def begin_step(self) -> None:
        """Begin a step, collectively."""

    def codec_of(self, count: int) -> tuple[str, Factory]:
        """Return name and factory of the codec for `count` values."""
        return self._name, self._factory

    @property
    def why(self) -> str:
        """The choice and its reason."""
        return f"{self._name}: requested"


class AutoCodec(CodecChoice):
    """Encodes a tensor with `dynamic8` if encoding shortens the exchange and the steps.

    First, a small and a large exchange are timed, with and without the codec. A line through the
    times of these two exchanges predicts the time of an exchange of any size. Because computation
    may hide exchanges, steps with and without the codec are then timed in turns
    (`paceline.core.turns`). The turns are repeated when steps become slower or faster.
    """

    sent_share = None

    def __init__(self, all_reduce: CompressedAllReduce) -> None:
        self._all_reduce = all_reduce
        self._lines = {name: self._line(name, factory) for name, factory in _FACTORIES.items()}
        self._turns = Choice(("plain", "encoded"))
        self._marks: list[float] = []

    @property
    def is_plain(self) -> bool:
        """Whether nothing is encoded in this step."""
        return self._turns.name == "plain"

    def begin_step(self) -> None:
        """Record the start of a step; after `num_steps` steps, update the choice collectively."""
        num_steps = self._turns.num_steps
        self._marks.append(time.monotonic())
        if num_steps is not None and len(self._marks) > num_steps:
            own = [end - start for start, end in pairwise(self._marks)]
            self._marks = self._marks[-1:]
            self._turns.add(self._all_reduce.agree(own))  # the slowest rank's time of each step

    def codec_of(self, count: int) -> tuple[str, Factory]:
        """Return name and factory of the codec for `count` values."""
        if not self.is_plain and self._pays(count):
            return _CODEC, _FACTORIES["encoded"]
        return "float32", _FACTORIES["plain"]

    @property
    def _verdict(self) -> str:
        used, seconds = "none" if self.is_plain else _CODEC, self._turns.seconds
        if not self._turns.settled:
            return f"{used} now; steps are measured with and without a codec"
        encoded_s, plain_s = duration(seconds["encoded"]), duration(seconds["plain"])
        return f"{used}, because steps took {encoded_s} with {_CODEC} and {plain_s} without"

    @property
    def why(self) -> str:
        """The choice and its measurements."""
        with_s, without_s = (self._seconds_of(name, 1_000_000) for name in ("encoded", "plain"))
        few_with_s, few_without_s = (self._lines[name].latency_s for name in ("encoded", "plain"))
        return (
            f"{self._verdict}; a million values take {with_s * 1e3:.3g} ms with dynamic8 and "
            f"{without_s * 1e3:.3g} ms without, one value {few_with_s * 1e3:.2g} and "
            f"{few_without_s * 1e3:.2g} ms"
        )

    def _pays(self, count: int) -> bool:
        return self._seconds_of("encoded", count) < _WORTH * self._seconds_of("plain", count)

    def _seconds_of(self, name: str, count: int) -> float:
        return self._lines[name].latency_s + self._lines[name].seconds_per_byte * count

    def _line(self, name: str, factory: Factory) -> LinearTime:
        """Return the line through the slowest rank's times of a small and a large exchange."""
        fastest = []
        for size in _SIZES:
            values = torch.ones(size, device=self._all_reduce.device)
            times = []
            for _ in range(_NUM_MEASURED):
                started = time.monotonic()
                self._all_reduce.begin(f"{name}{size}", values, factory, 1.0).future.wait()
                times.append(time.monotonic() - started)
            fastest.append(min(times))
        small, large = self._all_reduce.agree(fastest)
        return line_through((ExchangeSample(_SIZES[0], small), ExchangeSample(_SIZES[1], large)))


class CodecAllReduce(CompressedAllReduce):
    """An all-reduce with a codec; "auto" encodes only tensors whose exchange becomes faster.

    Created collectively. Raises InvalidInput if the ranks' codecs differ.
    """

    def __init__(
        self, codec: str | Codec, ranks: Sequence[int], device: torch.device, deadline_s: float
    ) -> None:
        super().__init__(ranks, device, deadline_s)
        try:
            self.check_same(name_of(codec))
            self._choice = AutoCodec(self) if codec == AUTO else CodecChoice(factory_of(codec))
        except InvalidInput:
            self.close()
            raise
        self._bytes_sent = [0, 0]  # do not count the measurements

    @property
    def why(self) -> str:
        """The codec in use, with the measurements."""
        return self._choice.why

    @property
    def sent_share(self) -> float | None:
        """The share of values that this rank sends; None if the codec omits no values."""
        return self._choice.sent_share

    @property
    def is_plain(self) -> bool:
        """Whether nothing is encoded until the next `begin_step`."""
        return self._choice.is_plain

    def begin_step(self) -> None:
        """Begin a step: drop unused error feedback, and update the choice."""
        super().begin_step()
        self._choice.begin_step()

    def reduce(self, key: str, values: Tensor, divisor: float = 1.0) -> Work:
        """Start an all-reduce, with the codec chosen for this number of values."""
        name, codec = self._choice.codec_of(len(values))
        return self.begin(f"{key}/{name}", values, codec, divisor)


def name_of(codec: str | Codec) -> str:
    """Return the codec's name, which must be equal on all ranks."""
    return AUTO if codec == AUTO else factory_of(codec)().name
