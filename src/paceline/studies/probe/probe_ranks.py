"""Measure a machine on all devices in parallel, and write its machine file.

`probe_machine` starts a process for each device, which runs `main`. Under torchrun, each process
calls `work`. Only rank 0 prints results and writes the file.
"""

import logging
import os
import platform
import sys
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from paceline.core.errors import InvalidInput
from paceline.core.machine import DeviceKind, Machine
from paceline.core.reading import validated
from paceline.core.settings import Record
from paceline.links.clock import Clock, clock_for
from paceline.links.devices import device_of, num_gpus
from paceline.links.group import Group
from paceline.links.launch import launch
from paceline.links.processes import module_command
from paceline.links.rendezvous import check_gpus
from paceline.links.shared_memory import LocalRanks, find_local_ranks
from paceline.measure import devices
from paceline.measure.this_machine import facts
from paceline.measure.timing import Sampler
from paceline.records.machine_file import machine_text
from paceline.report import advice
from paceline.report.terminal import console
from paceline.runs.launching import under_torchrun
from paceline.runs.rank import as_rank, leave
from paceline.studies.probe import machine_description as description
from paceline.studies.probe.link_speeds import Links, measure_codec_latencies

_NUM_MEASURED = 20  # the duration is divided equally among about this many measurements
_PATIENCE_S = 60.0  # a rank that takes this much longer than planned counts as lost
_MOST_BY_DEFAULT = 2
logger = logging.getLogger(__name__)
_CPU = torch.device("cpu")
_COMMENT = """Measured by `paceline probe`; each source contains the method, medians and quartiles.
All workers measured at the same time."""


class ProbeSettings(Record):
    """The settings of `paceline probe`; `seconds`: approximate duration of all measurements."""

    seconds: Annotated[float, Field(gt=0, le=3600)]
    workers: Annotated[int, Field(ge=1)]
    output: Path
    force: bool = False
    as_json: bool = False


def probe_settings(workers: int | None, output: Path | None, **values: Any) -> ProbeSettings:
    """Validate the settings of a probe.

    `workers`: None means torchrun's world size, or else the number of GPUs, or else 2 CPU workers
    (1 if there is a single core). `output`: None means a file named after this computer. Raises
    InvalidInput for invalid settings.
    """
    cores, gpus = len(os.sched_getaffinity(0)), num_gpus()
    started = int(os.environ["WORLD_SIZE"]) if under_torchrun() else None
    if workers is None:
        workers = started or gpus or min(_MOST_BY_DEFAULT, cores)
    output = output or Path(f"{description.name_from(platform.node().partition('.')[0])}.toml")
    values |= {"workers": workers, "output": output}
    settings = validated(ProbeSettings, values)
    if started is not None and workers != started:
        raise InvalidInput("workers", f"must equal torchrun's world size, {started}", got=workers)
    if started is None:
        check_gpus(workers)
    if started is None and not gpus and workers > cores:
        problem = f"must be at most {cores}, the number of cores, because no GPU was found"
        raise InvalidInput("workers", problem, got=workers)
    return settings


def probe_machine(settings: ProbeSettings) -> None:
    """Start a process for each device to measure this machine.

    Under torchrun, which has started the processes, this process measures as one rank, then exits.
    """
    if under_torchrun():
        leave(work(settings))
    if (problem := output_problem(settings)) is not None:
        raise problem
    command = module_command("paceline.studies.probe.probe_ranks", settings.model_dump_json())
    launch(command, settings.workers)


def work(settings: ProbeSettings) -> int:
    """Measure as one rank, and print any error; return the exit code."""
    # Read the usable cores now, because `as_rank` divides them among the host's ranks.
    usable = sorted(os.sched_getaffinity(0))
    return as_rank(partial(_probe_rank, settings, usable), _PATIENCE_S + settings.seconds)


def _probe_rank(settings: ProbeSettings, usable: list[int], group: Group) -> None:
    problem = output_problem(settings) if group.rank == 0 else None
    # If rank 0 refuses the output file, all ranks exit before measuring; rank 0 reports why.
    if (refused := group.gather(problem and str(problem))[0]) is not None:
        raise InvalidInput.of(refused)
    err = console(stderr=True, quiet=group.rank != 0)
    err.print(f"measuring {settings.workers} x {group.device.type}: about {settings.seconds:g} s")
    machine = measure(settings, usable, group)
    if group.rank != 0:
        return
    try:
        # Mode "x" fails if another process has created the file in the meantime.
        with settings.output.open("w" if settings.force else "x", encoding="utf-8") as file:
            file.write(machine_text(machine, _COMMENT))
    except OSError as error:
        why = f"cannot be written: {error.strerror}"
        raise InvalidInput("output", why, got=str(settings.output)) from None
    out = console()
    if settings.as_json:
        content = {"file": str(settings.output), "machine": machine.model_dump(mode="json")}
        out.print_json(data=content)
        return
    out.print(description.summary(machine), soft_wrap=True)
    out.print(f"written {settings.output}", soft_wrap=True)


def output_problem(settings: ProbeSettings) -> InvalidInput | None:
    """Return an error if the output file cannot or must not be written, else None."""
    path = settings.output
    if path.is_dir():
        problem, hint = "is a folder", f"name a file, such as {path / 'this.toml'}"
    elif not path.parent.is_dir():
        problem, hint = "is in a missing folder", "create the folder first"
    elif path.exists() and not settings.force:
        problem, hint = "is an existing file", "name another file, or replace it with --force"
    else:
        return None
    return InvalidInput("output", problem, got=str(path), hint=hint)


def measure(settings: ProbeSettings, usable: list[int], group: Group) -> Machine:
    """Measure devices, hosts and links; all ranks must call this function together.

    `usable`: the cores that this process was allowed to use when it started.
    """
    place = find_local_ranks(group)
    each = settings.seconds / _NUM_MEASURED
    on_device = Sampler(group, clock_for(group.device), each)
    on_host = Sampler(group, Clock(), each)
    device, several = device_of(group.device), group.world_size > 1
    on_gpu = device.kind == DeviceKind.GPU
    own = _figures(place, usable, on_device, on_host, group)
    rows = [
        description.RankFigures.model_validate(row)
        for row in group.gather(own.model_dump(mode="json"))
    ]
    if group.rank == 0 and device.kind == DeviceKind.CPU:
        unrest = description.unrest_of(rows)
        for warning in advice.of_unrest(unrest, "measured speeds of equal devices"):
            logger.warning("%s", warning)
    hosts = sorted({tuple(members) for members in group.gather(list(place.members))})
    method = (
        f"measured by paceline probe {version('paceline')} on {time.strftime('%Y-%m-%d')}, "
        f"torch {torch.__version__}, Python {own.facts['python']}, {own.facts['system']}"
    )
    name = description.name_from(settings.output.stem)
    machine = description.machine_of(name, rows, hosts, device.kind, method)
    if not several and not on_gpu:
        return machine
    links = Links(machine, hosts, on_host, on_device, method).measure()
    return Machine.model_validate(machine.model_dump() | {"links": links})


def _figures(
    place: LocalRanks, usable: list[int], on_device: Sampler, on_host: Sampler, group: Group
) -> description.RankFigures:
    """Measure this rank's device, memory copies, sums and codecs, together with all other ranks.

    `place`: the ranks of this host. `usable`: the cores that this process may use.
    """
    rows = group.gather(usable)
    device, several = device_of(group.device), group.world_size > 1
    known = facts(group.device)
    memory = device.memory_nbytes()  # None if the device uses the host's memory
    memory_nbytes = memory[1] if memory else known["memory_bytes"] // len(place.members)
    on_gpu, is_first = device.kind == DeviceKind.GPU, group.rank == place.members[0]
    return description.RankFigures(
        hostname=platform.node(),
        cores=len({core for rank in place.members for core in rows[rank]}),
        device_memory_bytes=memory_nbytes,
        has_own_memory=memory is not None,
        facts=known,
        device=devices.measure_device(on_device, group.device),
        copies=devices.measure_copies(on_host, place),
        sum_s=devices.measure_sums(on_host) if several else None,
        codec_latencies=measure_codec_latencies(on_host) if several else {},
        host_codecs=devices.measure_codecs(on_host, _CPU, is_first) if on_gpu else {},
    )


def main() -> None:
    """Run the process of one rank; its only argument is the settings as JSON."""
    leave(work(ProbeSettings.model_validate_json(sys.argv[1])))
