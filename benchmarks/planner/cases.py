"""List the configurations to plan and to run, grouped into cases of competing strategies."""

from dataclasses import dataclass
from itertools import product
from typing import Any

_STRATEGIES = ("allreduce", "tree", "host")


@dataclass(frozen=True)
class Configuration:
    """One run: a rehearsal that emulates `device`, or real training if `device` is None.

    `place`: the link between the workers, "loopback" or a rate between two hosts. Configurations of
    the same `case` compete. `settings`: strategy options. `steps`: epochs, if the run trains a
    model other than a GPT.
    """

    case: str
    place: str
    model: str
    device: str | None
    strategy: str
    codec: str | None
    workers: int
    batch_size: int
    steps: int
    settings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Strategy and codec, which differ within a case."""
        return f"{self.strategy} + {self.codec}" if self.codec else self.strategy

    @property
    def command(self) -> list[str]:
        """The arguments of `paceline`."""
        fields = (*self.settings, *([f"codec={self.codec}"] if self.codec else []))
        options = [word for field in fields for word in ("--strategy-option", field)]
        words = [
            *(self.model, "--strategy", self.strategy, *options),
            *("--workers", str(self.workers), "--batch-size", str(self.batch_size)),
        ]
        if self.device is None:
            unit = "--steps" if self.model.startswith("gpt") else "--epochs"
            return ["train", *words, unit, str(self.steps), "--learning-rate", "0.001"]
        return ["rehearse", *words, "--device", self.device, "--steps", str(self.steps)]


def _rivals(
    place: str,
    model: str,
    device: str | None,
    batch_size: int,
    steps: int,
    workers: int = 2,
    codecs: tuple[str | None, ...] = (None,),
    strategies: tuple[str, ...] = _STRATEGIES,
    settings: tuple[str, ...] = (),
) -> list[Configuration]:
    what = device or "trained"
    case = f"{model}, {what}, {workers} workers, {batch_size} samples, {place}"
    case += ", rounds" if settings else ""
    sizes = workers, batch_size, steps, settings
    return [
        Configuration(case, place, model, device, strategy, codec, *sizes)
        for strategy, codec in product(strategies, codecs)
        if not (strategy == "tree" and codec)
    ]


P100, K40 = "power8-p100/gpu0", "k40-gigabit/gpu0"
_ENCODED = (None, "dynamic8")
# Of `local`: a separate case, because it trains differently.
_ROUNDS: Any = {"codecs": _ENCODED, "strategies": ("local",), "settings": ("sync_every=8",)}
_FAST = ("allreduce", "host")  # for cases in which tree would take minutes

CASES = {
    "loopback": [
        *_rivals("loopback", "lenet5", K40, 2048, 60),
        *_rivals("loopback", "googlenet", P100, 64, 20),
        *_rivals("loopback", "resnet18", P100, 64, 20),
        *_rivals("loopback", "resnet50", P100, 32, 12),
        *_rivals("loopback", "alexnet", P100, 256, 12),
        *_rivals("loopback", "googlenet", K40, 64, 12, workers=4),
        *_rivals("loopback", "resnet18", K40, 64, 12, workers=4),
        *_rivals("loopback", "gpt-1m", K40, 16, 24),
        *_rivals("loopback", "gpt-10m", P100, 16, 12),
        *_rivals("loopback", "gpt-1m", K40, 16, 48, **_ROUNDS),
    ],
    "1gbit": [
        *_rivals("1gbit", "googlenet", K40, 32, 12, codecs=_ENCODED),
        *_rivals("1gbit", "resnet18", K40, 32, 12, codecs=_ENCODED),
        *_rivals("1gbit", "resnet50", K40, 16, 10, codecs=_ENCODED),
        *_rivals("1gbit", "alexnet", K40, 128, 8, codecs=_ENCODED, strategies=_FAST),
        *_rivals("1gbit", "gpt-1m", K40, 16, 24, codecs=_ENCODED, strategies=_FAST),
        *_rivals("1gbit", "gpt-10m", K40, 16, 48, **_ROUNDS),
    ],
    "100mbit": [
        *_rivals("100mbit", "googlenet", K40, 32, 8, codecs=_ENCODED, strategies=_FAST),
        *_rivals("100mbit", "lenet5", K40, 64, 30, codecs=_ENCODED),
        *_rivals("100mbit", "gpt-1m", K40, 16, 48, **_ROUNDS),
    ],
    "trained": [
        *_rivals("loopback", "lenet5", None, 256, 24),
        *_rivals("loopback", "mlp-64-1024-1024-10", None, 128, 24),
        *_rivals("loopback", "gpt-1m", None, 8, 40),
        *_rivals("loopback", "gpt-1m", None, 8, 48, **_ROUNDS),
    ],
}
