"""The command that measures this machine: probe."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.commands.options import Debug, Json


def probe(
    output: Annotated[
        Path | None, typer.Option(help="The file to write; without it, HOSTNAME.toml here.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Devices to measure: GPUs, or the cores shared out; all GPUs, or 2."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="About how long to measure.")] = 10.0,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure this machine, and write a machine file: layers, memory, links, codecs."""
    from paceline.probe.launching import carry_out, order

    wanted = order(workers, output, seconds=seconds, force=force, as_json=as_json, debug=debug)
    carry_out(wanted)
