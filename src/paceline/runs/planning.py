"""Plan and forecast the training of models; built-in models do not need torch."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.cluster import Cluster
from paceline.core.errors import InvalidInput
from paceline.core.machine import Machine
from paceline.core.plan import Plan
from paceline.core.strategy import Strategy, Window
from paceline.core.workload import Workload
from paceline.planner import Forecast, Ranking, forecast_one, search
from paceline.planner.device_speed import DeviceRate, Precision, calibrated, in_precision
from paceline.planner.forecast import memory
from paceline.planner.sweep import Sweep, parse_range
from paceline.planner.sweep import sweep as sweep_links
from paceline.records.built_in import recorded
from paceline.records.machine_file import find_machine
from paceline.records.profile import ProfileResult
from paceline.records.result import read_result
from paceline.records.settings import check_options
from paceline.strategies import STRATEGIES, find_strategy

if TYPE_CHECKING:
    from torch import nn

    from paceline.training.recipes.recipe import Recipe


def plan(
    model: "str | nn.Module | Recipe",
    machine: str | Path | Machine,
    batch_size: int = 64,
    input_shape: tuple[int, ...] | None = None,
    workers: int | None = None,
    strategy: str | Strategy | Sequence[str | Strategy] | None = None,
    options: Mapping[str, Any] | None = None,
    precision: Precision = "float32",
    measured: str | float | Path | None = None,
) -> Ranking:
    """Forecast each strategy on a machine with 1, 2, ... workers, and rank the forecasts.

    Covers all placements of workers, and all codecs whose speed the machine file contains, each
    with its best chunk size (number of layers exchanged together). The ranking's `refused` lists
    refused configurations with reasons. Its `worth` is the smallest number of workers whose
    throughput is within 2 % of the best.

    `machine`: a machine file, or the name of one of machines/*.toml. `batch_size`: samples of a
    step over all workers. `input_shape`: shape of one sample, required for modules and factories.
    `workers`: plan only this number of workers. `strategy`: plan only this strategy or these
    strategies, each a name, package.module:record or `Strategy`. `options`: fields of a single
    strategy's configuration; if `options` include a codec, plans without a codec are compared, too.
    `precision`: "bfloat16" or "float16" computes with two bytes per value. `measured`: throughput
    of one device, such as "350/s", or "350/s@128" for batch size 128. Without "@", the batch size
    is `batch_size` divided by `workers` (1 if not given). `measured` can also be the folder or
    result.json of `paceline profile` with one worker. Raises InvalidInput if an argument is
    not usable.
    """
    asked = model, machine, batch_size, input_shape, workers, precision, measured
    workload, known = question(*asked)
    chosen = _chosen(known, model, input_shape, strategy, options or {})
    return search(workload, known, chosen, batch_size, workers, options or {})


def sweep(
    model: "str | nn.Module | Recipe",
    machine: str | Path | Machine,
    over: str,
    batch_size: int = 64,
    input_shape: tuple[int, ...] | None = None,
    workers: int | None = None,
    strategy: str | Strategy | Sequence[str | Strategy] | None = None,
    options: Mapping[str, Any] | None = None,
    precision: Precision = "float32",
    measured: str | float | Path | None = None,
) -> Sweep:
    """Return the rankings of `plan` over a range of link bandwidths or latencies.

    `over`: the range, such as "bandwidth=100M:10G" in bit/s or "latency=10u:1m" in seconds. It
    applies to the links between hosts; for a single host, to all links. Without `workers` all
    devices are used. Raises the same errors as `plan`.
    """
    asked = model, machine, batch_size, input_shape, workers, precision, measured
    workload, known = question(*asked)
    chosen = _chosen(known, model, input_shape, strategy, options or {})
    links = parse_range(over)
    return sweep_links(workload, known, chosen, batch_size, links, workers, options or {})


def forecast(
    model: "str | nn.Module | Recipe",
    machine: str | Path | Machine,
    strategy: str | Strategy = "allreduce",
    *,
    options: Mapping[str, Any] | None = None,
    workers: int | None = None,
    batch_size: int = 64,
    input_shape: tuple[int, ...] | None = None,
    balanced: bool = False,
    precision: Precision = "float32",
    measured: str | float | Path | None = None,
) -> Forecast:
    """Forecast one configuration of a strategy on the first `workers` devices of a machine.

    `options`: fields of the strategy's configuration, such as codec="dynamic8"; if they do not set
    `chunk`, the best chunk size is used. `workers`: by default the number of devices, or
    `batch_size` if that is smaller. `balanced`: split the batch in proportion to the workers'
    speeds. The other arguments are those of `plan`. Raises the same errors as `plan`. If `plan`
    would refuse the configuration, raises InvalidInput with the reason.
    """
    named = find_strategy(strategy) if isinstance(strategy, str) else strategy
    if balanced and named.planning.plan_balanced is None:
        raise InvalidInput("balanced", f"is not supported by strategy {named.name}")
    asked = model, machine, batch_size, input_shape, workers, precision, measured
    workload, known = question(*asked)
    count = min(known.num_devices, batch_size) if workers is None else workers
    given = dict(options or {})
    config = check_options(named, given, count)
    named = _trying(named, model, input_shape, given)
    how = {"balanced": balanced, "any_chunk": "chunk" not in given}
    return forecast_one(workload, known, named, config, batch_size, **how)


def _chosen(
    machine: Machine,
    model: "str | nn.Module | Recipe",
    input_shape: tuple[int, ...] | None,
    given: str | Strategy | Sequence[str | Strategy] | None,
    options: Mapping[str, Any],
) -> list[Strategy]:
    """Return the strategies to plan; raise InvalidInput for options with several strategies.

    The default is all strategies that can run, and for a cluster also those that can only be
    planned.
    """
    each = [given] if isinstance(given, str | Strategy) else given or ()
    named = [find_strategy(known) if isinstance(known, str) else known for known in each]
    if options and len(named) != 1:
        raise InvalidInput("options", "requires a single strategy", hint="name one strategy")
    if options:
        check_options(named[0], options)
    on_cluster = isinstance(machine, Cluster)
    usual = (known for known in STRATEGIES.values() if on_cluster or known.running is not None)
    return [_trying(known, model, input_shape, options) for known in named or usual]


def _trying(
    strategy: Strategy,
    model: "str | nn.Module | Recipe",
    input_shape: tuple[int, ...] | None,
    options: Mapping[str, Any],
) -> Strategy:
    """Return the strategy, changed so that it splits the model only where a trial succeeds.

    A strategy that does not split models is returned unchanged. For a built-in model without
    options it never changes, because tests already check the model's default split.
    """
    is_known = isinstance(model, str) and ":" not in model
    planning = strategy.planning
    if planning.trial is None or (is_known and not options):
        return strategy
    from paceline.training.recipes.named import tried_with

    trial = import_module(planning.trial)
    possible, refused = set[str](), dict[str, str]()  # layers before which the model can be split

    def tried(workload: Workload, config: Any) -> Workload:
        known = replace(workload, refused_cuts=tuple(refused.items()))
        with suppress(InvalidInput):  # `with_possible_cut` raises it with a better hint
            if trial.first_of(known, config) in possible:
                return known
        own = partial(trial.with_possible_cut, workload=known, config=config)
        found: Workload = tried_with(model, own, input_shape)
        refused.update(found.refused_cuts)
        possible.add(trial.first_of(found, config))
        return found

    def plan_of(workload: Workload, machine: Machine, config: Any, window: Window) -> Plan:
        return planning.plan(tried(workload, config), machine, config, window)

    def memory_of(workload: Workload, machine: Machine, config: Any) -> Mapping[str, int]:
        # The first call refuses most wrong configs before `tried` builds the model.
        memory(workload, machine, strategy, config)
        return memory(tried(workload, config), machine, strategy, config)

    return replace(strategy, planning=replace(planning, plan=plan_of, memory=memory_of))


def question(
    model: "str | nn.Module | Recipe",
    machine: str | Path | Machine,
    batch_size: int,
    input_shape: tuple[int, ...] | None,
    workers: int | None,
    precision: Precision,
    measured: str | float | Path | None,
) -> tuple[Callable[[int], Workload], Machine]:
    """Find the workload and the machine of a plan from the arguments of `plan`.

    Returns the workload as a function of a worker's batch size, and the machine. Both are adapted
    to `precision` and `measured`. Raises InvalidInput for unusable arguments.
    """
    known = machine if isinstance(machine, Machine) else find_machine(str(machine))
    if batch_size < 1:
        raise InvalidInput("batch_size", "must be at least 1", got=batch_size)
    if input_shape is not None and (not input_shape or min(input_shape) < 1):
        raise InvalidInput("input_shape", "must have sizes of at least 1", got=input_shape)
    known, workload = in_precision(
        known,
        partial(_workload_of, model, input_shape),
        precision,
        is_measured=measured is not None,
    )
    if measured is not None:
        own = -(-batch_size // (workers or 1))
        known = calibrated(known, workload, _rate(measured, model), own)
    return workload, known


def _workload_of(
    model: "str | nn.Module | Recipe", input_shape: tuple[int, ...] | None, batch_size: int
) -> Workload:
    """Return the workload of a step; for built-in models it is read from built_in.json."""
    if isinstance(model, str) and input_shape is None:
        found = recorded(model, batch_size)
        if found is not None:
            return found
    from paceline.training.recipes.named import workload_of

    return workload_of(model, batch_size, input_shape)


def _rate(measured: str | float | Path, model: object) -> DeviceRate:
    """Parse the rate of a device, or read the rate from a profile of `model` with one worker."""
    path = Path(str(measured))
    if not isinstance(measured, Path) and not path.exists():
        return DeviceRate.parse(measured)
    result = read_result(path.parent if path.is_file() else path)
    if not isinstance(result, ProfileResult) or result.settings.workers != 1:
        problem = f"{path} is not a profile with one worker"
        raise InvalidInput("measured", problem, hint="run paceline profile MODEL --workers 1")
    if isinstance(model, str) and model != result.settings.model:
        raise InvalidInput("measured", f"{path} is of model {result.settings.model}, not {model}")
    size = result.settings.batch_size
    return DeviceRate(size / result.step.median_s, size)
