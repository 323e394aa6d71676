"""Whether a codec pays: the best forecast without one beside the best with one."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.planner.forecast import Forecast, rank

_WORTH = 0.95  # of the step without: predictions are hardly better, and codecs round
_ALL = 0.99  # of a step


@dataclass(frozen=True)
class Advice:
    """Whether a codec pays: the best forecast without one, and the best with one.

    `beside` is the best without one on as many workers as the one with it.
    """

    plain: Forecast
    encoded: Forecast
    beside: Forecast

    @property
    def pays(self) -> bool:
        """Whether the codec makes a step so much faster that it is worth what it rounds."""
        return self.encoded.step_s < _WORTH * self.plain.step_s

    @property
    def speedup(self) -> float:
        """How many times faster a step is with the codec."""
        return self.plain.step_s / self.encoded.step_s

    @property
    def sentence(self) -> str:
        """Say so, and why."""
        plain, encoded = self.plain, self.encoded
        times = f"({_seconds(encoded.step_s)} for {_seconds(plain.step_s)})"
        if not self.pays:
            would = f"{_named(encoded)} would be {_compared(self.speedup)} {times}"
            return f"no codec pays: {self._why_not()}; {would}"
        faster = f"{_named(encoded)} is {_compared(self.speedup)} than"
        alike = (plain.strategy, plain.workers) == (encoded.strategy, encoded.workers)
        without = "without" if alike else f"{_named(plain)} without"
        return (
            f"a codec pays: {faster} {without} {times}; the link is busy "
            f"{100 * self.beside.link_busy:.0f} % of a plain step; codecs round gradients: "
            "compare the accuracy, too"
        )

    def _why_not(self) -> str:
        if self.plain.workers == 1:
            return "one worker alone is faster, and exchanges nothing"
        if not self.plain.link_busy:
            return f"{self.plain.strategy} sends nothing over a link"
        if self.plain.breakdown.compute_s > _ALL * self.plain.step_s:
            return "the exchange hides behind backward"
        if self.speedup > 1:
            return "it saves less than predictions may err"
        return "encoding takes longer than it saves"


def advise(forecasts: Sequence[Forecast]) -> Advice | None:
    """Return whether a codec pays, or None where no forecast has one."""
    ranked = rank(forecasts)
    plain = [forecast for forecast in ranked if forecast.codec is None]
    encoded = next((forecast for forecast in ranked if forecast.codec is not None), None)
    if encoded is None:
        return None
    beside = next(forecast for forecast in plain if forecast.workers == encoded.workers)
    return Advice(plain[0], encoded, beside)


def _named(forecast: Forecast) -> str:
    codec = f" with {forecast.codec}" if forecast.codec else ""
    workers = f"{forecast.workers} worker{'s' * (forecast.workers > 1)}"
    return f"{forecast.strategy}{codec} on {workers}"


def _compared(speedup: float) -> str:
    factor = f"{max(speedup, 1 / speedup):.2f}"
    if factor == "1.00":
        return "as fast"
    return f"{factor}x {'faster' if speedup > 1 else 'slower'}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
