"""Which codec each exchange uses: the one that was asked for, or the one that pays."""

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Literal, Protocol

import torch

from paceline.codecs.cast import Cast
from paceline.codecs.codec import Codec
from paceline.codecs.names import factory_of, find_codec
from paceline.core.calibration import Line, Measurement, line_through
from paceline.core.wire_format import AUTO, wire_format
from paceline.exchange.compressed import CompressedAllReduce

Factory = Callable[[], Codec]

_CODEC = wire_format(AUTO).name  # what plans of "auto" encode with, too
_SIZES = (1 << 10, 1 << 21)  # values of a small and of a large exchange
_NUM_MEASURED = 3
_NUM_SETTLING = 4  # steps in which torch makes its buckets, and caches fill
_NUM_TRIED = 8  # steps with codecs, and as many without
_WORTH = 0.98  # of the time without: less would be noise, and codecs round


class CodecChoice(Protocol):
    """Says with which codec a tensor is exchanged; the same on all ranks."""

    def begin_step(self) -> None:
        """Learn that a step begins to exchange. All ranks call it together."""
        ...

    def codec_of(self, count: int) -> tuple[str, Factory]:
        """Return the codec for a tensor of so many values, and its name."""
        ...

    @property
    def why(self) -> str:
        """Say what was chosen, and on which figures."""
        ...


class Asked:
    """The codec that was asked for."""

    def __init__(self, factory: Factory) -> None:
        self._factory, self._name = factory, factory().name

    def begin_step(self) -> None:
        """Nothing changes."""

    def codec_of(self, count: int) -> tuple[str, Factory]:
        """Return the codec."""
        return self._name, self._factory

    @property
    def why(self) -> str:
        """Say so."""
        return f"{self._name}: asked for"


class Paying:
    """Codec `dynamic8` for tensors which it makes faster to exchange, if steps become faster too.

    A small and a large exchange, with and without the codec, say for which sizes it pays: it adds
    messages no less than a plain exchange has, and takes time of its own. Whether that shortens a
    step depends on what hides behind backward: so steps are tried both ways, and the codec is
    switched off for good where it does not win.
    """

    def __init__(self, all_reduce: CompressedAllReduce) -> None:
        self._all_reduce = all_reduce
        self._plain: Factory = partial(Cast, "float32")
        self._encoded: Factory = partial(find_codec, _CODEC)
        self._lines = {name: self._line(name) for name in ("plain", "encoded")}
        self._mode: Literal["encoded", "plain"] = "encoded"
        self._num_steps = 0
        self._last_s: float | None = None
        self._seconds: dict[str, list[float]] = {"encoded": [], "plain": []}
        self._verdict = "dynamic8 where it pays, until steps are tried without"

    def begin_step(self) -> None:
        """Note how long the last step took, and decide when both ways have been tried."""
        now, last, self._last_s = time.monotonic(), self._last_s, time.monotonic()
        self._num_steps += 1
        tried = self._num_steps - _NUM_SETTLING
        if last is None or not 0 < tried <= 2 * _NUM_TRIED:
            return
        self._seconds[self._mode].append(now - last)
        if tried == 2 * _NUM_TRIED:
            self._decide()
        else:
            self._mode = "encoded" if tried < _NUM_TRIED else "plain"

    def codec_of(self, count: int) -> tuple[str, Factory]:
        """Return the codec for a tensor of so many values, and its name."""
        if self._mode == "encoded" and self._pays(count):
            return _CODEC, self._encoded
        return "float32", self._plain

    @property
    def why(self) -> str:
        """Say what was chosen, and on which figures."""
        plain, encoded = self._lines["plain"], self._lines["encoded"]
        return (
            f"{self._verdict}; a million values take {_million_ms(encoded):.3g} ms with "
            f"dynamic8 and {_million_ms(plain):.3g} ms without, a few {encoded.latency_s * 1e3:.2g}"
            f" and {plain.latency_s * 1e3:.2g} ms"
        )

    def _pays(self, count: int) -> bool:
        plain, encoded = (_seconds_of(self._lines[name], count) for name in ("plain", "encoded"))
        return encoded < _WORTH * plain

    def _decide(self) -> None:
        medians = [median(self._seconds[name][1:]) for name in ("encoded", "plain")]
        encoded_s, plain_s = self._all_reduce.agree(medians)
        self._mode = "encoded" if encoded_s < _WORTH * plain_s else "plain"
        outcome = _CODEC if self._mode == "encoded" else "none"
        self._verdict = (
            f"{outcome}, because steps took {encoded_s * 1e3:.3g} ms with dynamic8 where it pays "
            f"and {plain_s * 1e3:.3g} ms without"
        )

    def _line(self, name: str) -> Line:
        """Measure an exchange of each size; the slowest rank's times count."""
        factory = self._plain if name == "plain" else self._encoded
        fastest = [min(self._times(name, factory, size)) for size in _SIZES]
        small, large = self._all_reduce.agree(fastest)
        return line_through((Measurement(_SIZES[0], small), Measurement(_SIZES[1], large)))

    def _times(self, name: str, factory: Factory, size: int) -> list[float]:
        values = torch.ones(size, device=self._all_reduce.device)
        times = []
        for _ in range(_NUM_MEASURED):
            started = time.monotonic()
            self._all_reduce.begin(f"{name}{size}", values, factory, 1.0).future.wait()
            times.append(time.monotonic() - started)
        return times


def choice_of(codec: str | Codec, all_reduce: CompressedAllReduce) -> CodecChoice:
    """Return how the codec of an exchange is chosen. All ranks call it together.

    InvalidInput if ranks have been given different codecs.
    """
    all_reduce.check_same(name_of(codec))
    return Paying(all_reduce) if codec == AUTO else Asked(factory_of(codec))


def name_of(codec: str | Codec) -> str:
    """Return the name that must be the same on all ranks."""
    return AUTO if codec == AUTO else factory_of(codec)().name


def _seconds_of(line: Line, count: int) -> float:
    return line.latency_s + line.seconds_per_byte * count


def _million_ms(line: Line) -> float:
    return 1e3 * _seconds_of(line, 1_000_000)
