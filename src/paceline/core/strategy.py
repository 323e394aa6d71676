"""A strategy: a record of how it is planned, how it is run, and which options it takes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

from paceline.core.after_backward import AfterBackward, BackwardPhase
from paceline.core.cost import ProfiledCost
from paceline.core.errors import InvalidInput, shown
from paceline.core.link_fit import in_ring
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


PlanOf = Callable[[Workload, Machine, Any, Window], Plan]


@dataclass(frozen=True, slots=True)
class Planning:
    """How a strategy is predicted: its plan, and what the planner may vary and expect."""

    plan: PlanOf
    """Returns the tasks of a window of steps: of one worker's part of a step, a machine, a config.

    In a step each of `config.workers` workers trains on one batch, or whoever is free on as many
    samples. Raises InvalidInput if the strategy does not fit.
    """

    plan_balanced: PlanOf | None = None
    """The same with parts that follow the workers' speeds (`--balance auto`), if that differs."""

    memory: Callable[[Workload, Machine, Any], Mapping[str, int]] | None = None
    """Returns the bytes that each device and host needs, by name; by default a replica each."""

    calibrate: Callable[..., Machine] | None = in_ring
    """Gives a profiled machine links that make this strategy's exchange as fast as measured.

    Called with the machine, which has one device a worker and no links, the `ExchangeSamples` and
    the config. By default in a ring. None: its exchange cannot be measured by itself.
    """

    steps_per_period: Callable[[Any], int] = lambda config: 1
    """Returns how many steps workers take between two exchanges: these are a step of the plan."""

    repeats_after: Callable[[Any], int] = lambda config: 1
    """Returns the number of steps after which the plan's steps are alike again."""

    variants: Callable[[int], Iterable[Any]] | None = None
    """Returns the configs of so many workers to forecast; by default the config as it comes."""

    sizes: Callable[[Workload, Any], Iterable[Any]] | None = None
    """Returns configs of other exchange sizes, largest first, or placements; a search takes one."""

    trial: str | None = None
    """The module that tries where a model can be cut: `with_possible_cut`; None cuts no model."""

    symmetric: bool = False
    """Plans tasks of one node for all equal nodes, so that any number of workers can be planned."""

    shares_devices: bool = False
    """Lets several workers alternate on a device, so that there may be more than devices."""

    is_asynchronous: bool = False
    """Does not let workers wait for the slowest of them."""

    steps_to_loss: Callable[[Workload, Any], StepsToLoss | None] | None = None
    """Returns the steps to synchronous training's loss, None if unknown; by default as many."""

    after_backward: Callable[[BackwardPhase], AfterBackward] | None = None
    """Returns what several workers' exchange leaves after backward, and why."""

    limit: Callable[[Machine, Any, Timeline], str | None] | None = None
    """Returns a sentence on what keeps more workers from gaining, or None."""


@dataclass(frozen=True, slots=True)
class Running:
    """How a strategy trains: its module, and the processes of a run."""

    module: str
    """Has `start(session)` (`paceline.exchange.session.Start`); imported late, as it needs torch.

    A strategy of replicas takes `start` from `paceline.exchange.replicas`, and has
    `replica(module, config, group)`.
    """

    roles: Callable[[Any], tuple[Role, ...]] = lambda config: (Role("rank", config.workers),)
    """Returns the processes of a run; by default equal ranks."""

    remote: str | None = None
    """The module by which other machines take part; None: only ranks do.

    `WORKING` names the module whose `take_part(settings, clients)` works for a hub (`paceline
    worker`), `SERVING` that of a hub that is a worker of another (`paceline hub --connect`), whose
    settings are `ChildSettings`.
    """

    ends_together: bool = True
    """False if a rank may return from an exchange before its last bytes are sent.

    A measurement then waits for all ranks before it begins the next exchange.
    """

    may_skip_profile: bool = False
    """Trains without a forecast where `profile_s` is 0."""

    is_rehearsed: bool = True
    """Takes the steps of a rehearsal with the same runner."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a strategy makes of a run's settings."""

    settings: frozenset[str] = frozenset()
    """The optional settings that it understands; others are refused."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Settings that differ with it where nobody gives them."""

    refused_settings: Mapping[str, str] = field(default_factory=dict)
    """Settings that it cannot follow, with the reason and what would do."""

    refused_options: Mapping[str, str] = field(default_factory=dict)
    """Fields of the config that a plan may name and a run may not, with the reason."""

    count_workers: Callable[[int | str], int] = number_of
    """Reads the setting `workers`, where that may be more than a number."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way of training in parallel."""

    name: str
    """What `--strategy` calls it."""

    config: type
    """A dataclass of its configuration, with defaults and a field `workers`."""

    planning: Planning
    """How it is predicted."""

    running: Running | None = None
    """How it trains; None: it can be planned only, and is looked at on clusters."""

    options: Options = Options()
    """What it makes of a run's settings."""

    def runner(self) -> Any:
        """Import the module that runs it; InvalidInput if it can be planned only."""
        if self.running is None:
            raise InvalidInput("strategy", f"{self.name!r} can be planned, but not run here")
        return import_module(self.running.module)

    @property
    def is_led(self) -> bool:
        """True if the process that was asked to train takes part itself, as hub or coordinator."""
        roles = self.running.roles(self.config()) if self.running else ()
        return any(role.leads for role in roles)

    @property
    def is_rehearsed(self) -> bool:
        """True if it can be rehearsed."""
        return self.running is not None and self.running.is_rehearsed


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
