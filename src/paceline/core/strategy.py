"""The record that defines a strategy: planning, running, options."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

from paceline.core.cost import ProfiledCost
from paceline.core.errors import InvalidInput, shown
from paceline.core.link_fit import in_ring
from paceline.core.machine import Machine
from paceline.core.plan import Plan
from paceline.core.timeline import Timeline
from paceline.core.workload import Workload


@dataclass(frozen=True, slots=True)
class Window:
    """Number of steps in a plan."""

    num_steps: int


@dataclass(frozen=True)
class StepsToLoss:
    """Steps to synchronous training's final loss, divided by synchronous training's steps.

    `median`: median of similar measured runs. `low`, `high`: range of these runs. `measured_on`:
    models of these runs.
    """

    median: float
    low: float
    high: float
    measured_on: str


@dataclass(frozen=True, slots=True)
class Role:
    """A kind of process in a run, and the number of such processes.

    `leads`: the calling process has this role, and starts the other processes. A strategy without a
    leading role has equal ranks, which a launcher or torchrun starts.
    """

    name: str
    count: int
    leads: bool = False


class PricedMachine(NamedTuple):
    """A profiled machine, and the cost model of a strategy's tasks on it."""

    machine: Machine
    cost: ProfiledCost


def number_of(workers: int | str) -> int:
    """Return the number of workers in a setting; InvalidInput if it is not a number."""
    try:
        return int(workers)
    except ValueError:
        raise InvalidInput("workers", f"must be a number (got {shown(workers)})") from None


def exchange_name(strategy: str, config: Any) -> str:
    """Return the name of a strategy's exchange, such as "host with dynamic8"."""
    codec = gradient_codec(config)
    return strategy if codec is None else f"{strategy} with {codec}"


PlanOf = Callable[[Workload, Machine, Any, Window], Plan]


@dataclass(frozen=True, slots=True)
class Planning:
    """How the planner plans and forecasts a strategy."""

    plan: PlanOf
    """Plans a window of steps from a worker's workload, a machine and a config.

    In a step each of `config.workers` workers trains on one batch; asynchronous workers train on
    as many samples together. Raises InvalidInput if the strategy does not fit the machine or model.
    """

    plan_balanced: PlanOf | None = None
    """The plan with balanced shares (`--balance auto`), if it differs."""

    memory: Callable[[Workload, Machine, Any], Mapping[str, int]] | None = None
    """Returns the bytes needed on each device and host, by name. None: a replica per device."""

    calibrate: Callable[..., Machine] | None = in_ring
    """Fits a profiled machine's links to this strategy's measured exchanges.

    Arguments: the machine, with one device per worker and no links; the `ExchangeSamples`; the
    config. By default the links form a ring. None: the exchange cannot be measured separately.
    """

    steps_per_period: Callable[[Any], int] = lambda config: 1
    """Returns the number of local steps between exchanges, which form one step of the plan."""

    repeats_after: Callable[[Any], int] = lambda config: 1
    """Returns the number of steps after which the plan repeats."""

    variants: Callable[[int], Iterable[Any]] | None = None
    """Returns the configs to forecast for a number of workers. None: only the default config."""

    sizes: Callable[[Workload, Any], Iterable[Any]] | None = None
    """Returns configs to search: with other exchange sizes, largest first, or placements."""

    trial: str | None = None
    """Module whose `with_possible_cut` finds a cut of the model; None if no cut is needed."""

    symmetric: bool = False
    """Plans one node for all equal nodes, so that any number of workers can be planned."""

    shares_devices: bool = False
    """Allows several workers to alternate on a device, so workers may outnumber devices."""

    is_asynchronous: bool = False
    """Workers do not wait for the slowest one."""

    steps_to_loss: Callable[[Workload, Any], StepsToLoss | None] | None = None
    """Returns the relative steps to synchronous training's loss, or None if unknown.

    Without this function the strategy needs as many steps as synchronous training.
    """

    reports_after_backward: bool = False
    """Forecasts report the communication left after backward (Le et al. 2018, section 3.2)."""

    limit: Callable[[Machine, Any, Timeline], str | None] | None = None
    """Returns a sentence about what limits further workers, or None."""


@dataclass(frozen=True, slots=True)
class Running:
    """How a strategy runs: its module and processes."""

    module: str
    """Module with `start(session)`, a context of a `paceline.exchange.session.Runner`.

    A strategy of replicas uses `start` of `paceline.exchange.replicas`, and defines
    `replica(module, config, group)`.
    """

    roles: Callable[[Any], tuple[Role, ...]] = lambda config: (Role("rank", config.workers),)
    """Returns the roles of a run's processes; by default equal ranks."""

    remote: str | None = None
    """Module for workers on other machines; None if only ranks take part.

    `WORKING` names the module whose `take_part(settings, clients)` works for a hub (`paceline
    worker`), `SERVING` that of a hub that is a worker of another (`paceline hub --connect`), whose
    settings are `ChildSettings`.
    """

    ends_together: bool = True
    """False if a rank may return from an exchange before the rank's last bytes are sent.

    Measurements then synchronise all ranks before the next exchange.
    """

    may_skip_profile: bool = False
    """Trains without a forecast if `profile_s` is 0."""

    is_rehearsed: bool = True
    """Supports rehearsals with the same runner."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a strategy treats a run's settings."""

    settings: frozenset[str] = frozenset()
    """Optional settings that the strategy supports; other optional settings are refused."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The strategy's defaults of settings, where they differ from the general ones."""

    refused_settings: Mapping[str, str] = field(default_factory=dict)
    """Unsupported settings, with the reason and an alternative."""

    refused_options: Mapping[str, str] = field(default_factory=dict)
    """Fields of the config that only plans support, with the reason."""

    count_workers: Callable[[int | str], int] = number_of
    """Returns the number of workers in the setting `workers`, which may also be a list."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """A strategy of parallel training."""

    name: str
    """Name for `--strategy`."""

    config: type
    """Configuration dataclass with defaults and a field `workers`."""

    planning: Planning

    running: Running | None = None
    """How the strategy runs; None if it can only be planned, on clusters."""

    options: Options = Options()

    def runner(self) -> Any:
        """Import the module that runs the strategy; InvalidInput if it can only be planned."""
        if self.running is None:
            raise InvalidInput("strategy", "cannot be run, only planned", got=self.name)
        return import_module(self.running.module)

    @property
    def is_led(self) -> bool:
        """Whether the calling process takes part, as hub or coordinator."""
        roles = self.running.roles(self.config()) if self.running else ()
        return any(role.leads for role in roles)

    @property
    def is_rehearsed(self) -> bool:
        """Whether the strategy can be rehearsed."""
        return self.running is not None and self.running.is_rehearsed


class Prober(NamedTuple):
    """A configured strategy, and a factory of probes for its exchange.

    A probe (`paceline.exchange.replica.Probe`) exchanges gradients of given sizes in the order of
    the layers. `make` gets the sizes: for each layer, the bytes of its tensors.
    """

    strategy: Strategy
    config: Any
    make: Callable[[Sequence[Sequence[int]]], Any]


_CODEC_FIELDS = ("codec", "activations", "activation_gradients", "parameters", "gradients")


def codec_fields(config: Any) -> tuple[str, ...]:
    """Return the configuration fields that name codecs."""
    return tuple(field for field in _CODEC_FIELDS if hasattr(config, field))


def gradient_codec(config: Any) -> str | None:
    """Return the codec of a strategy's gradients, if any."""
    named = (getattr(config, field, None) for field in ("codec", "gradients"))
    return next((codec for codec in named if codec is not None), None)
