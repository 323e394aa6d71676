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
    """The number of steps that a plan covers."""

    num_steps: int


@dataclass(frozen=True)
class StepsToLoss:
    """Steps needed to reach a given loss, divided by the steps of synchronous training.

    `median`: median of measured runs. `low`, `high`: range of these runs. `measured_on`: the models
    of these runs.
    """

    median: float
    low: float
    high: float
    measured_on: str


@dataclass(frozen=True, slots=True)
class Role:
    """A kind of process in a run, and the number of such processes.

    `leads`: whether the user's process has this role, and starts the other processes. If no role
    leads, all processes are equal ranks, which a launcher or torchrun starts.
    """

    name: str
    count: int
    leads: bool = False


class PricedMachine(NamedTuple):
    """A profiled machine, and a cost model with the task times that the profile measured."""

    machine: Machine
    cost: ProfiledCost


def number_of(workers: int | str) -> int:
    """Convert setting `workers` to a number; InvalidInput for text that is not a number."""
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
    """Functions and properties with which the planner forecasts a strategy."""

    plan: PlanOf
    """Returns the plan of a window of steps from a worker's workload, a machine and a config.

    In a step each of `config.workers` workers trains on the workload's batch. Asynchronous workers
    together train on the same number of samples. Raises InvalidInput if the strategy does not fit
    the machine or model.
    """

    plan_balanced: PlanOf | None = None
    """Returns a plan with unequal shares of a batch (`--balance auto`); None: not supported."""

    memory: Callable[[Workload, Machine, Any], Mapping[str, int]] | None = None
    """Returns the bytes needed on each device and host by name; None: one replica per device."""

    calibrate: Callable[..., Machine] | None = in_ring
    """Returns a profiled machine with links that fit measured exchanges of this strategy.

    Arguments: the machine, with one device per worker and no links; the `ExchangeSamples`; the
    config. By default the links form a ring. None: the exchange cannot be measured alone.
    """

    steps_per_period: Callable[[Any], int] = lambda config: 1
    """Returns a config's number of local steps between exchanges; a plan joins them in one step."""

    repeats_after: Callable[[Any], int] = lambda config: 1
    """Returns the number of steps after which a config's plan repeats."""

    variants: Callable[[int], Iterable[Any]] | None = None
    """Returns the configs to forecast for a number of workers; None: only the default config."""

    sizes: Callable[[Workload, Any], Iterable[Any]] | None = None
    """Returns configs to compare, with other sub-batches (largest first) or placements."""

    trial: str | None = None
    """Module that splits the model in two (`first_of`, `with_possible_cut`); None: not split."""

    symmetric: bool = False
    """Whether a plan for one node represents all equal nodes, so that any number can be planned."""

    shares_devices: bool = False
    """Whether several workers may alternate on a device, so that workers can outnumber devices."""

    is_asynchronous: bool = False
    """Whether workers train without waiting for the slowest worker."""

    steps_to_loss: Callable[[Workload, Any], StepsToLoss | None] | None = None
    """Returns the number of steps to a loss, relative to synchronous training; None if unknown.

    Without this function, the strategy needs as many steps as synchronous training.
    """

    reports_after_backward: bool = False
    """Whether forecasts report the exchange time after backward (Le et al. 2018, section 3.2)."""

    limit: Callable[[Machine, Any, Timeline], str | None] | None = None
    """Returns a sentence about why more workers would not train faster, or None."""


@dataclass(frozen=True, slots=True)
class Running:
    """The modules and processes with which a strategy runs."""

    module: str
    """Module with `start(session)`, a context manager of a `paceline.exchange.session.Runner`.

    Strategies in which each rank has a whole model import `start` from `paceline.exchange.replicas`
    and define `replica(module, config, group)`. Exchanges that `auto` may choose also define
    `method(config)`.
    """

    roles: Callable[[Any], tuple[Role, ...]] = lambda config: (Role("rank", config.workers),)
    """Returns the roles of a run's processes; by default equal ranks."""

    remote: str | None = None
    """Module for workers that connect to a hub; None if all processes are ranks.

    It defines two modules with a function `take_part(settings, clients)`: `WORKING` runs `paceline
    worker`. `SERVING` runs a hub that is a worker of another hub (`paceline hub --parent`), with
    the settings `ChildSettings`; its `take_part` also gets the progress.
    """

    ends_together: bool = True
    """Whether a rank has sent its last bytes when its exchange returns.

    If not, measurements synchronise all ranks before the next exchange.
    """

    may_skip_profile: bool = False
    """Whether the strategy can train without a profile and forecast, if `profile_s` is 0."""

    is_rehearsed: bool = True
    """Whether `paceline rehearse` supports the strategy."""


# Settings of strategies in which each rank has the whole model and trains on a part of the batch.
REPLICA_SETTINGS = frozenset({"balance", "keep_all", "slowdown"})


@dataclass(frozen=True, slots=True)
class Options:
    """The settings that a strategy supports, and defaults that differ from other strategies'."""

    settings: frozenset[str] = frozenset()
    """Optional settings that the strategy supports; all others are errors."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of settings that differ from the defaults of other strategies."""

    refused_settings: Mapping[str, str] = field(default_factory=dict)
    """Settings that are errors, each with the reason and an alternative."""

    refused_options: Mapping[str, str] = field(default_factory=dict)
    """Fields of the config that are errors except in plans, each with the reason."""

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

    def roles(self, config: Any) -> tuple[Role, ...]:
        """Return the roles of a run's processes; () if the strategy can only be planned."""
        return self.running.roles(config) if self.running else ()

    @property
    def is_led(self) -> bool:
        """Whether the user's process takes part in the run, as hub or coordinator."""
        return any(role.leads for role in self.roles(self.config()))

    @property
    def is_rehearsed(self) -> bool:
        """Whether the strategy can run with emulated layers, to time its exchanges."""
        return self.running is not None and self.running.is_rehearsed


class Prober(NamedTuple):
    """A strategy with its config, and a function that creates probes of its exchange.

    A probe (`paceline.exchange.replica.Probe`) exchanges gradients of given sizes in the order of
    the layers. The argument of `make`: for each layer, the bytes of each of its tensors.
    """

    strategy: Strategy
    config: Any
    make: Callable[[Sequence[Sequence[int]]], Any]


_CODEC_FIELDS = ("codec", "activations", "activation_gradients", "parameters", "gradients")


def codec_fields(config: Any) -> tuple[str, ...]:
    """Return the configuration fields that name codecs."""
    return tuple(field for field in _CODEC_FIELDS if hasattr(config, field))


def gradient_codec(config: Any) -> str | None:
    """Return the codec of gradients in a strategy's config; None without a codec."""
    named = (getattr(config, field, None) for field in ("codec", "gradients"))
    return next((codec for codec in named if codec is not None), None)
