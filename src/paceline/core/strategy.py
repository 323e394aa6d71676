"""A strategy: a record of its configuration, its plan, its processes and its runner."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

from paceline.core.after_backward import AfterBackward, BackwardPhase
from paceline.core.cost import ProfiledCost
from paceline.core.errors import InvalidInput, shown
from paceline.core.machine import Machine
from paceline.core.plan import Plan
from paceline.core.steps_to_loss import StepsToLoss
from paceline.core.timeline import Timeline
from paceline.core.workload import Workload


@dataclass(frozen=True, slots=True)
class Window:
    """The number of steps that a plan covers."""

    num_steps: int

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"a window has at least one step, not {self.num_steps}")


@dataclass(frozen=True, slots=True)
class Role:
    """A kind of process that a run consists of, and how many of it there are.

    `leads`: the process that was asked to train does this itself and starts the others. A strategy
    without such a role has equal ranks, which a launcher or torchrun starts.
    """

    name: str
    count: int
    leads: bool = False


class PricedMachine(NamedTuple):
    """A profiled machine, and the costs of a strategy's tasks on it."""

    machine: Machine
    cost: ProfiledCost


def number_of(workers: int | str) -> int:
    """Return the number of workers that a setting asks for; InvalidInput if it is no number."""
    try:
        return int(workers)
    except ValueError:
        raise InvalidInput("workers", f"{shown(workers)} is not a number") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A way of training in parallel.

    `plan` takes what one worker does in a step, the machine, a `config` and a window of steps. In a
    step each of `config.workers` workers trains on one batch, or whoever is free on as many
    samples. Where workers take several such steps between two exchanges, a step of the plan is all
    of them: `steps_per_period(config)`. Where not all steps of a plan are alike, these repeat
    themselves after `repeats_after(config)`. `plan_balanced`: the same, with parts that follow the
    workers' speeds (`--balance auto`), if the plan is another one then.
    `run` names the module whose `start(session)` trains (see `paceline.exchange.session`), so that
    planning never imports torch; None: the strategy can be planned only.

    `roles`: the processes of a run, by default equal ranks. `memory`: the bytes that each
    device, and each host that holds anything, needs, by name; by default every device holds a
    replica. `variants`: the configurations of so many workers that are worth looking at; by
    default the one as it comes. `sizes(workload, config)`: configurations that differ in the
    size of what they exchange at a time, from the largest on, or in the devices that share a
    part of the work; a search takes one of them, by default the one as it comes.
    `calibrate(machine, measurements, config=None)`: for strategies whose exchange of all
    gradients can be measured by itself. It returns the machine, which has one device a worker
    and no links, with links on which a small and a large exchange take as long as measured with
    `config`. `ends_together`: False if some rank is done with an exchange while its last bytes
    are on their way to others, which a measurement has to wait for. `symmetric`: tasks of one
    node's workers stand for those of all equal nodes, so that any number can be planned, on
    `machine.for_workers(workers, symmetric=True)`. `is_for_clusters`: between hosts that no levels
    join, it would be what another strategy does already.

    `settings`: the optional settings of a run that it understands; others are refused. `defaults`:
    settings that are different with it when nobody gives them. `refused_options`: fields of
    `config` that a plan may name and a run may not, each with the reason. `refused_settings`:
    settings of a run that it cannot follow, each with the reason and what would do; their defaults
    are taken. `count_workers` reads
    the setting `workers` where that may be more than a number. `worker` names the module with
    which a process works for a hub, on this machine or another (`paceline worker`): its
    `take_part(settings, clients)`. `child_hub`: the module with which a hub is itself a worker of
    another hub.
    `may_skip_profile`: it trains without a forecast, too, where `profile_s` is 0.
    `is_asynchronous`: workers do not wait for the slowest of them.
    `is_rehearsed`: its runner takes the steps of a rehearsal, too.
    `steps_to_loss(workload, config)`: for a strategy that does not learn the same as equal workers
    that exchange all gradients in each step, the steps that it needs to the same loss; None if that
    is not known. `after_backward(phase)`: what the
    exchange of several workers leaves to be done after backward, and why (`core.after_backward`).
    `trial` names the module whose `with_possible_cut(model, inputs, workload, config)` tries where
    a model can be cut in two; None: the strategy cuts none.
    `shares_devices`: several workers may alternate on a device, so there may be more than devices.
    `limit(machine, config, timeline)`: a sentence about what keeps more workers from gaining, to
    stand beside a forecast, or None.
    """

    name: str
    config: type
    plan: Callable[[Workload, Machine, Any, Window], Plan]
    plan_balanced: Callable[[Workload, Machine, Any, Window], Plan] | None = None
    steps_per_period: Callable[[Any], int] = lambda config: 1
    repeats_after: Callable[[Any], int] = lambda config: 1
    run: str | None = None
    roles: Callable[[Any], tuple[Role, ...]] = lambda config: (Role("rank", config.workers),)
    memory: Callable[[Workload, Machine, Any], Mapping[str, int]] | None = None
    variants: Callable[[int], Iterable[Any]] | None = None
    sizes: Callable[[Workload, Any], Iterable[Any]] | None = None
    calibrate: Callable[..., Machine] | None = None
    ends_together: bool = True
    symmetric: bool = False
    is_for_clusters: bool = False
    settings: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    refused_options: Mapping[str, str] = field(default_factory=dict)
    refused_settings: Mapping[str, str] = field(default_factory=dict)
    count_workers: Callable[[int | str], int] = number_of
    worker: str | None = None
    child_hub: str | None = None
    may_skip_profile: bool = False
    is_asynchronous: bool = False
    is_rehearsed: bool = True
    steps_to_loss: Callable[[Workload, Any], StepsToLoss | None] | None = None
    after_backward: Callable[[BackwardPhase], AfterBackward] | None = None
    trial: str | None = None
    shares_devices: bool = False
    limit: Callable[[Machine, Any, Timeline], str | None] | None = None

    def runner(self) -> Any:
        """Import the module `run` and return it; InvalidInput if the strategy cannot be run."""
        if self.run is None:
            raise InvalidInput("strategy", f"{self.name!r} can be planned, but not run here")
        return import_module(self.run)

    @property
    def is_led(self) -> bool:
        """True if the process that was asked to train takes part itself, as hub or coordinator."""
        return any(role.leads for role in self.roles(self.config()))


class Prober(NamedTuple):
    """A strategy with a configuration, and a factory of probes of its exchange.

    A probe (`paceline.exchange.replica.Probe`) exchanges gradients of layers whose parameters have
    these bytes, in that order of layers.
    """

    strategy: Strategy
    config: Any
    make: Callable[[Sequence[Sequence[int]]], Any]


_CODEC_FIELDS = ("codec", "activations", "activation_gradients", "parameters", "gradients")


def codec_fields(config: Any) -> tuple[str, ...]:
    """Return the fields of a strategy's configuration that name codecs."""
    return tuple(field for field in _CODEC_FIELDS if hasattr(config, field))


def gradient_codec(config: Any) -> str | None:
    """Return the codec by which a strategy's gradients travel, if any."""
    named = (getattr(config, field, None) for field in ("codec", "gradients"))
    return next((codec for codec in named if codec is not None), None)
