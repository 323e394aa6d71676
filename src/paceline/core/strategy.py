"""What a strategy is: a record of its configuration, its plan and where its runner lies."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from paceline.core.calibration import Measurements
from paceline.core.machine import Machine
from paceline.core.plan import Plan
from paceline.core.workload import Workload


@dataclass(frozen=True, slots=True)
class Window:
    """The number of steps that a plan covers."""

    num_steps: int

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"a window has at least one step, not {self.num_steps}")


class Calibrate(Protocol):
    """From what a small and a large exchange took to the machine on which they take that."""

    def __call__(self, machine: Machine, measured: Measurements, config: Any = None) -> Machine:
        """Return the machine of which only the two or more devices were known, one a worker.

        `config` is the one with which the exchanges were measured, and holds for plans with it
        alone; None stands for that of the strategy as it comes.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A way of training in parallel.

    `plan` takes what one worker does in a step, the machine, a `config` and a window of steps. In a
    step each of `config.workers` workers trains on one batch, or as many samples as that are
    trained on by whoever is free. `memory` is the bytes that each device, and each host that holds
    anything, needs for it, by name; without one every device holds a replica. `variants` are the
    configurations of so many workers that are worth looking at; without it, the one as it comes.
    With `symmetric`, tasks of one node's workers stand for those of all equal nodes, so that any
    number of them can be planned: on `machine.for_workers(workers, symmetric=True)`.
    """

    name: str
    config: type
    plan: Callable[[Workload, Machine, Any, Window], Plan]
    memory: Callable[[Workload, Machine, Any], Mapping[str, int]] | None = None
    variants: Callable[[int], Iterable[Any]] | None = None
    symmetric: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange(Strategy):
    """A strategy of equal workers that exchange all gradients in each step.

    `run` names the module that does the real work, so that planning never imports torch: its
    `train` trains, and its `exchange` exchanges gradients alone, to be measured.
    """

    calibrate: Calibrate
    run: str


class Prober(NamedTuple):
    """A strategy with a configuration, and what makes a probe of its exchange.

    A probe (`exchange.probe`) exchanges gradients of layers whose parameters have these bytes, in
    that order of layers.
    """

    strategy: Exchange
    config: Any
    make: Callable[[Sequence[Sequence[int]]], Any]


_CODEC_FIELDS = ("codec", "activations", "residuals", "errors", "parameters", "gradients")


def codec_fields(config: Any) -> tuple[str, ...]:
    """Return the fields of a strategy's configuration that name codecs."""
    return tuple(field for field in _CODEC_FIELDS if hasattr(config, field))
