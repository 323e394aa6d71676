"""The command that writes what starts a training on several machines: launch."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.commands.options import Debug, Json, print_json, with_options
from paceline.core.errors import InvalidInput
from paceline.core.settings import TrainSettings
from paceline.studies.launch.formats import Launcher, written
from paceline.studies.launch.job import Job, JobSettings

if TYPE_CHECKING:
    from paceline.core.machine import Device
    from paceline.planner import Forecast

_HELP = {name: field.description for name, field in JobSettings.model_fields.items()}
_LEFT_OUT = ("bind", "keys", "run", "wait_s", "port", "resume", "policy")


@with_options(TrainSettings, leave_out=_LEFT_OUT)
def launch(
    values: dict[str, Any],
    *,
    emit: Annotated[Launcher, typer.Option(help="What shall start it.")],
    machine: Annotated[
        str | None,
        typer.Option(help="The cluster's machine file, whose plan chooses what is not given."),
    ] = None,
    nodes: Annotated[int | None, typer.Option(help=_HELP["nodes"])] = None,
    gpu: Annotated[str | None, typer.Option(help=_HELP["gpu"])] = None,
    cpus: Annotated[int | None, typer.Option(help=_HELP["cpus"])] = None,
    hours: Annotated[float | None, typer.Option(help=_HELP["hours"])] = None,
    master: Annotated[str | None, typer.Option(help=_HELP["master"])] = None,
    master_port: Annotated[int | None, typer.Option(help=_HELP["master_port"])] = None,
    image: Annotated[str | None, typer.Option(help=_HELP["image"])] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Print what starts this training on a cluster: commands, a batch script, or YAML."""
    from paceline import __version__
    from paceline.records.settings import validated, validated_settings

    asked = {"nodes": nodes, "gpu": gpu, "cpus": cpus, "hours": hours, "master": master}
    asked |= {"master_port": master_port, "image": image}
    sentences: tuple[str, ...] = ()
    if machine is not None:
        values, asked, sentences = _planned(values, asked, machine)
    given = {name: value for name, value in asked.items() if value is not None}
    job = Job(
        settings=validated_settings(values),
        asked=validated(JobSettings, given),
        predicted=sentences,
    )
    text = written(job, emit, __version__)
    print_json({"launcher": emit, "text": text}) if as_json else typer.echo(text, nl=False)


def _planned(
    values: Mapping[str, Any], asked: Mapping[str, Any], machine: str
) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    """Return the settings with what the plan chooses, and sentences of it.

    That is the strategy and the number of workers, where they are not given, and the machines.
    """
    best = _best(values, machine)
    devices = best.machine.devices[: best.workers]
    chosen = {**values, "strategy": best.strategy, "workers": best.workers}
    hosts = len({device.host for device in devices})
    return chosen, {**asked, **_place(asked, devices, hosts)}, (_sentence(best, machine, values),)


def _place(asked: Mapping[str, Any], devices: "Sequence[Device]", num_hosts: int) -> dict[str, Any]:
    """Return on how many machines the workers are; InvalidInput for GPUs without a name."""
    if asked["gpu"] is None and any(device.kind == "gpu" for device in devices):
        raise InvalidInput(
            "gpu", "the plan is for GPUs", hint="name them as the cluster does: --gpu H100"
        )
    return {} if asked["nodes"] is not None else {"nodes": num_hosts}


def _best(values: Mapping[str, Any], machine: str) -> "Forecast":
    """Return the forecast of the strategy that is given, or the best of those that are alike.

    Other strategies and codecs change what is learnt: only those that are given are taken.
    """
    from paceline.api.planning import plan
    from paceline.core.strategy import gradient_codec
    from paceline.strategies import EXCHANGES

    named = values.get("strategy", "auto")
    options = values.get("options", {})
    workers = values.get("workers")
    ranking = plan(
        values["model"],
        machine=machine,
        batch_size=values.get("batch_size", 64),
        workers=None if workers is None else int(workers),
        strategies=list(EXCHANGES) if named == "auto" else [named],
        options=options,
        precision=values.get("precision", "float32"),
    )
    for one in ranking:
        if gradient_codec(one.config) in (None, options.get("codec")):
            return one
    why = ranking.refused[0].why if ranking.refused else "no strategy is left"
    raise InvalidInput("machine", f"nothing can be planned on {machine}: {why}")


def _sentence(best: "Forecast", machine: str, values: Mapping[str, Any]) -> str:
    from paceline.report.format import duration, share

    reached = f"{best.samples_per_s:,.0f} samples/s ±{share(best.range_share, 0)}"
    told = f"predicted on {machine}: {best.strategy} with {best.workers} workers, {reached}"
    steps = values.get("steps")
    takes = "" if steps is None else f"; {steps:,} steps take {duration(best.step_s * int(steps))}"
    return f"{told}{takes}; {best.why}"
