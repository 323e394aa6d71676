"""Validate the settings of a run against its strategy; errors name the field."""

import sys
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from paceline.core.defaults import completed
from paceline.core.errors import InvalidInput, shown
from paceline.core.names import not_known
from paceline.core.reading import check_numbers, validated
from paceline.core.settings import (
    DATA,
    InputShape,
    Model,
    Record,
    RehearseSettings,
    RunSettings,
    Seconds,
    TrainSettings,
    read_list,
)
from paceline.core.strategy import Strategy, codec_fields, number_of
from paceline.planner.device_speed import Precision
from paceline.strategies import EXCHANGES, STRATEGIES, find_runnable

AUTO = "auto"  # value of `strategy` that selects the fastest strategy by forecast
_MOST_DIGITS = 9  # maximum digits of a number of workers


class PlanSettings(Record):
    """The settings of `paceline plan`."""

    kind: Literal["plan"] = "plan"
    model: Model
    machine: str | None = Field(
        None, description="Machine file, or name of a machine; by default this machine, profiled."
    )
    strategy: Annotated[tuple[str, ...] | None, BeforeValidator(read_list)] = Field(
        None, description="Strategies to plan, such as allreduce,host; by default all."
    )
    options: dict[str, Any] = Field(
        {}, description="Option of the strategy, such as chunk=4; can be repeated."
    )
    data: str | None = Field(None, description=DATA)
    workers: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Number of workers to plan for; by default 1, 2, ... up to all devices."
    )
    batch_size: int = Field(64, ge=1, description="Samples per step, summed over all workers.")
    input_shape: InputShape = None
    precision: Precision = Field("float32", description="Precision of forward and backward.")
    measured: str | None = Field(
        None,
        description=(
            "Measured samples per second of one device, such as 350/s or 350/s@128 (batch size "
            "128), or the folder of a `paceline profile` of the model."
        ),
    )
    profile_s: Seconds = Field(
        4.0, description="How long to profile the model before planning, in seconds."
    )
    output: Path | None = Field(
        None, description="Folder in which to create a folder with the plan and its report."
    )


def validated_settings(values: Mapping[str, Any]) -> TrainSettings:
    """Validate the settings of a training; InvalidInput names the invalid field.

    A setting of None gets the default of the strategy or of a built-in model. For a user's model
    the setting stays None, because the user's recipe may define its own optimizer.
    """
    given = {name: value for name, value in values.items() if value is not None}
    if "epochs" in given and "steps" in given:
        raise InvalidInput("steps", "cannot be combined with --epochs")
    if given.get("strategy") == AUTO:
        if given.get("options"):
            hint = "name the strategy that has these options"
            raise InvalidInput("options", "cannot be combined with strategy auto", hint=hint)
        # Accept codec "auto": strategies that have no codecs are then tried without one.
        asked = {k: v for k, v in given.items() if (k, v) != ("codec", "auto")}
        for strategy in EXCHANGES.values():
            _refuse_useless(asked, strategy, AUTO, TrainSettings)
        settings = validated(TrainSettings, _numbered(given))
        is_balanced = False  # no error for keep_all: strategy auto may leave out workers
    else:
        settings = validated(TrainSettings, _of_strategy(given, TrainSettings))
        is_balanced = "balance" in strategy_of(settings).options.settings
    if settings.keep_all and settings.balance is None and is_balanced:
        raise InvalidInput("keep_all", "requires --balance or strategy auto")
    _check(settings)
    return settings if ":" in settings.model else completed(settings)


def validated_rehearsal(values: Mapping[str, Any]) -> RehearseSettings:
    """Validate the settings of a rehearsal; InvalidInput names the invalid field."""
    given = {name: value for name, value in values.items() if value is not None}
    settings = validated(RehearseSettings, _of_strategy(given, RehearseSettings))
    if not strategy_of(settings).is_rehearsed:
        known = ", ".join(name for name, one in STRATEGIES.items() if one.is_rehearsed)
        problem = "must be a strategy that can be rehearsed"
        raise InvalidInput("strategy", problem, got=settings.strategy, hint=f"choose from {known}")
    _check(settings)
    return settings


def _check(settings: RunSettings) -> None:
    """Raise InvalidInput for invalid options, or if a profile is needed but `profile_s` is 0."""
    for name in ("options", "optimizer_options"):
        check_numbers(getattr(settings, name, {}), name, largest=sys.float_info.max)
    is_named = settings.strategy != AUTO
    if is_named:
        configuration(settings)
    running = strategy_of(settings).running if is_named else None
    if settings.profile_s == 0 and not (running and running.may_skip_profile):
        raise InvalidInput(
            "profile_s", "must be greater than 0 for a strategy that needs a profile", got=0
        )


def strategy_of(settings: RunSettings) -> Strategy:
    """Return the strategy of a run; InvalidInput if it is unknown or cannot run."""
    return find_runnable(settings.strategy)


def configuration(settings: RunSettings) -> Any:
    """Return the configuration of a run's strategy; InvalidInput names the invalid field."""
    strategy = strategy_of(settings)
    num_workers = strategy.options.count_workers(settings.workers)
    return strategy_config(strategy, settings.options, num_workers)


def strategy_config(strategy: Strategy, options: Mapping[str, Any], num_workers: int) -> Any:
    """Build the configuration of a run from options; InvalidInput names the invalid option."""
    for field, why in strategy.options.refused_options.items():
        if field in options:
            raise InvalidInput(f"options.{field}", why)
    return check_options(strategy, options, num_workers)


def check_options(strategy: Strategy, options: Mapping[str, Any], num_workers: int = 1) -> Any:
    """Build the configuration of a plan from options; InvalidInput names the invalid option."""
    if "workers" in options:
        raise InvalidInput("options", "cannot contain workers", hint="set workers separately")
    known = [name for name in signature(strategy.config).parameters if name != "workers"]
    for name in options:
        if name not in known:
            raise not_known("options", name, known, f" for strategy {strategy.name}")
    return validated(strategy.config, {**options, "workers": num_workers}, "options.")


def _of_strategy(given: dict[str, Any], kind: type[RunSettings]) -> dict[str, Any]:
    """Add the strategy's defaults to the given settings, and replace `codec` by options.

    Raises InvalidInput for settings that the strategy does not support.
    """
    name = given.get("strategy", RunSettings.model_fields["strategy"].default)
    strategy = find_runnable(str(name), f" or {AUTO}" if kind is TrainSettings else "")
    _refuse_useless(given, strategy, strategy.name, kind)
    own = strategy.options.defaults  # may include settings that a rehearsal lacks
    defaults = {name: value for name, value in own.items() if name in kind.model_fields}
    given = without_shorthands({**defaults, **given}, strategy)
    if strategy.options.count_workers is number_of:
        return _numbered(given)
    workers = str(given.get("workers", kind.model_fields["workers"].default))
    strategy.options.count_workers(workers)
    # Keep `workers` as text: RunSettings would refuse an integer greater than batch_size, but each
    # worker of this strategy has its own batches.
    return given | {"workers": workers}


def without_shorthands(given: Mapping[str, Any], strategy: Strategy) -> dict[str, Any]:
    """Replace the setting `codec` by the strategy's options that name codecs."""
    options = given.get("options", {})
    if not isinstance(options, dict):
        return dict(given)  # pydantic reports that `options` has the wrong type
    others = {name: value for name, value in given.items() if name != "codec"}
    if "codec" not in given:
        return others | {"options": options}
    if not isinstance(given["codec"], str):
        raise InvalidInput("codec", "must be text", got=given["codec"])
    codecs = _codecs(given["codec"], strategy)
    try:
        validated(strategy.config, codecs)
    except InvalidInput as error:
        raise InvalidInput("codec", error.problem) from None
    for field, value in codecs.items():
        if options.get(field, value) != value:
            problem = f"contradicts option {field}={options[field]}"
            raise InvalidInput("codec", problem, got=given["codec"], hint="give only one of them")
        options = options | {field: value}
    return others | {"options": options}


def _numbered(given: dict[str, Any]) -> dict[str, Any]:
    """Convert `workers` to an integer, or raise InvalidInput."""
    workers = given.get("workers", 1)
    if isinstance(workers, int):
        return given
    if not isinstance(workers, str):
        raise InvalidInput("workers", "must be an integer", got=workers)
    if not workers.strip().isdecimal():
        known = STRATEGIES.values()
        taking = [one.name for one in known if one.options.count_workers is not number_of]
        hint = f"a list of devices requires strategy {' or '.join(taking)}"
        raise InvalidInput("workers", "must be an integer", got=workers, hint=hint)
    if len(workers) > _MOST_DIGITS:
        raise InvalidInput(
            "workers", f"must have at most {_MOST_DIGITS} digits", got=shown(workers)
        )
    return given | {"workers": int(workers)}


def _refuse_useless(
    given: Mapping[str, Any], strategy: Strategy, asked: str, kind: type[RunSettings]
) -> None:
    """Raise InvalidInput for a given setting that the strategy does not support.

    `asked`: the strategy's name in the error.
    """
    for name in given:
        knowing = _knowing(name)
        # Accept defaults of unsupported settings, because run.toml contains all defaults.
        is_default = name in kind.model_fields and given[name] == kind.model_fields[name].default
        is_idle = is_default or given[name] is False
        if knowing and name not in strategy.options.settings and not is_idle:
            hint = f"supported by {', '.join(knowing)}"
            raise InvalidInput(name, f"is not supported by strategy {asked}", hint=hint)
    for name, why in strategy.options.refused_settings.items():
        is_given = name in given and name in kind.model_fields
        if is_given and given[name] != kind.model_fields[name].default:
            raise InvalidInput(name, f"is not supported by strategy {strategy.name}", hint=why)


def _knowing(name: str) -> list[str]:
    """Return the strategies that support an optional setting; [] if all strategies support it."""
    return [one.name for one in STRATEGIES.values() if name in one.options.settings]


def useful_settings(settings: RunSettings) -> dict[str, Any]:
    """Return a dict of the settings that the strategy supports and that are not None."""
    is_auto = settings.strategy == AUTO
    strategies = tuple(EXCHANGES.values()) if is_auto else (strategy_of(settings),)
    values = settings.model_dump(exclude={"kind"}, exclude_none=True)
    return {
        name: value
        for name, value in values.items()
        if not _knowing(name) or all(name in one.options.settings for one in strategies)
    }


def _codecs(text: str, strategy: Strategy) -> dict[str, Any]:
    """Parse the setting `codec`; return options and their codecs, with None for "none"."""
    fields = codec_fields(strategy.config())
    if fields == ("codec",):
        return {"codec": None if text == "none" else text}
    options: dict[str, Any] = {}
    for part in text.split(","):
        purpose, equals, codec = (word.strip() for word in part.partition("="))
        if not equals or not codec:
            raise InvalidInput("codec", "must be a list such as gradients=dynamic8", got=part)
        if purpose not in fields:
            raise not_known("codec", purpose, fields)
        if purpose in options:
            raise InvalidInput("codec", f"has two values for {purpose}", got=text)
        options[purpose] = None if codec == "none" else codec
    return options
