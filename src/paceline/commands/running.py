"""The commands `train`, `rehearse` and `plan`."""

import os
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any, Literal

from paceline.commands.options import Json, option, print_json, with_options
from paceline.core.errors import InvalidInput
from paceline.core.reading import validated
from paceline.core.settings import RehearseSettings, TrainSettings
from paceline.core.timeline import Origin
from paceline.links.forkserver import open_server
from paceline.links.memory import KEEPING_MEMORY
from paceline.records.settings import PlanSettings

if TYPE_CHECKING:
    from paceline.report.plans import Form

_OF_HUBS = ("listen", "keys", "run_name", "wait_s")
_RARE = ("run_name", "wait_s")
# The fork server imports these modules, and with them torch's compiler, once for all workers.
_IMPORTED = ("paceline.runs.launching", "paceline.exchange.synchronized")


@with_options(TrainSettings, leave_out=_OF_HUBS)
def train(values: dict[str, Any], *, as_json: Json = False) -> None:
    """Profile, plan and train a model, and write its result, trace and report."""
    _carry_out("train", values, as_json=as_json)


@with_options(RehearseSettings, leave_out=_RARE)
def rehearse(values: dict[str, Any], *, as_json: Json = False) -> None:
    """Rehearse training on emulated devices: the exchange is real, the layers only wait."""
    _carry_out("rehearse", values, as_json=as_json)


def _carry_out(
    verb: Literal["train", "plan", "rehearse"], values: Mapping[str, Any], **how: bool
) -> None:
    """Validate the settings, then train, plan or rehearse on this machine's workers.

    `how`: further fields of `RunRequest`, such as `as_json`.
    """
    # The fork server imports torch at the same time as this process, and then forks the workers.
    # Under torchrun, this process is a worker itself and starts none.
    under_torchrun = "RANK" in os.environ
    environment = KEEPING_MEMORY | os.environ
    with nullcontext() if under_torchrun else open_server(_IMPORTED, environment):
        from paceline.runs import launching

        launching.carry_out(launching.requested(verb, values, **how))


_LINKS = "Plan for a range of bandwidths or latencies of links, such as latency=10u:1m."


@with_options(PlanSettings)
def plan(
    values: dict[str, Any],
    *,
    explain: Annotated[
        bool,
        option(
            "",
            "Explain each prediction, and draw a step of the best strategy.",
            "--explain",
        ),
    ] = False,
    sweep: Annotated[str | None, option("bandwidth=FROM:TO", _LINKS)] = None,
    as_markdown: Annotated[bool, option("", "Print the tables as Markdown.", "--markdown")] = False,
    as_json: Json = False,
) -> None:
    """Predict the step time of each strategy, best first, and the gain of codecs."""
    settings = validated(PlanSettings, values)
    if settings.machine is None:
        if sweep:
            raise InvalidInput("sweep", "requires --machine")
        if "," in values.get("strategy", ""):
            raise InvalidInput("strategy", "must be a single name; a list requires --machine")
        _check_profiled(settings)
        how = {"as_json": as_json, "as_markdown": as_markdown, "explain": explain}
        _carry_out("plan", values, keep="output" in values, **how)
        return
    if settings.data is not None:
        raise InvalidInput("data", "cannot be combined with --machine")
    size = settings.batch_size
    about = f"{settings.model} predicted on {settings.machine}, {size} samples a step"
    if sweep is None:
        form: Form = "json" if as_json else "markdown" if as_markdown else "text"
        _plan(settings, about, explain, form)
    elif settings.output is not None:
        raise InvalidInput("output", "cannot be combined with --sweep")
    elif explain:
        raise InvalidInput("explain", "cannot be combined with --sweep")
    else:
        _sweep(settings, about, sweep, as_json)


def _check_profiled(settings: PlanSettings) -> None:
    """Raise InvalidInput if a setting was given that requires --machine."""
    hints = {
        "input_shape": "without --machine, the data set determines the shape",
        "precision": "without --machine, it is float32",
    }
    for name in ("input_shape", "measured", "precision"):
        if getattr(settings, name) != PlanSettings.model_fields[name].default:
            raise InvalidInput(name, "requires --machine", hint=hints.get(name, ""))


def _asked(settings: PlanSettings) -> dict[str, Any]:
    """Return the arguments that `paceline.plan` and `paceline.sweep` share."""
    return settings.model_dump(exclude={"kind", "data", "profile_s", "output"})


def _plan(settings: PlanSettings, about: str, explain: bool, form: "Form") -> None:
    from paceline import __version__
    from paceline.planner.second_machine import second_machine
    from paceline.report.terminal import console
    from paceline.runs.folder import new_id, show_plan
    from paceline.runs.planning import plan as plan_on
    from paceline.runs.planning import question

    asked = _asked(settings)
    ranking = plan_on(**asked)
    if ranking or form == "json" or settings.output is not None:
        fields = settings.model_dump(include={"model", "machine", "batch_size", "input_shape"})
        fields |= {"id": new_id(settings.model, "-planned"), "facts": {"paceline": __version__}}
        if explain or settings.output is not None:
            own = {name: asked[name] for name in asked.keys() - {"options", "strategy"}}
            fields["second_machine"] = second_machine(*question(**own), settings.batch_size)
        fields |= {"form": form, "explain": explain, "is_measured": settings.measured is not None}
        show_plan(console(), ranking, settings.output, about, **fields)
    if not ranking:
        reasons = (f"{one.why} ({one.strategy})" for one in ranking.refused)
        why = next(reasons, "no strategy is available")
        raise InvalidInput("machine", f"cannot run {settings.model}: {why}")


def _sweep(settings: PlanSettings, about: str, over: str, as_json: bool) -> None:
    from paceline.planner.sweep import chart
    from paceline.report.terminal import console
    from paceline.runs.planning import sweep as sweep_on

    found = sweep_on(**_asked(settings), over=over)
    if as_json:
        values = settings.model_dump(include={"model", "machine", "batch_size"})
        values |= {"sweep": over, "origin": Origin.PREDICTED, "values": found.range.values}
        print_json(values | {"samples_per_s": found.series, "best": found.sentences})
        return
    out = console()
    out.print(about)
    for text in (chart(found), *found.sentences):
        out.print(text, soft_wrap=True)
