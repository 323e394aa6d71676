"""One rank of a probe, from joining the others to writing the machine file.

`python -m paceline.probe.rank` is how the launcher starts one; under torchrun every rank calls
`work` itself. Rank 0 speaks for all.
"""

import os
import platform
import sys
import traceback
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field

from paceline.core.errors import InvalidInput, PacelineError, WorkersFailed
from paceline.core.machine import Machine
from paceline.links.cores import share_cores
from paceline.links.group import Group, process_group
from paceline.links.shared_memory import Place, find_place
from paceline.native import die_with_parent
from paceline.probe.device import measure_codec_latencies, measure_codecs, measure_device
from paceline.probe.host import measure_copies, measure_sums
from paceline.probe.links import Links
from paceline.probe.machine import RankFigures, described, name_from, said_how, summary
from paceline.probe.sample import Sampler
from paceline.probe.text import machine_text
from paceline.record.clock import HostClock, clock_for
from paceline.tables import console
from paceline.training.this_machine import facts
from paceline.worker import leave

_NUM_MEASURED = 20  # roughly: each gets its part of the time
_PATIENCE_S = 60.0
_COMMENT = """Measured by `paceline probe`: each source says how, and gives medians and quartiles.
Rates are what was reached while all workers were at work."""


class Order(BaseModel):
    """What the ranks are to do: measure for about `seconds`, and write the machine to `output`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds: Annotated[float, Field(gt=0, le=3600)]
    workers: Annotated[int, Field(ge=1)]
    output: Path
    force: bool = False
    as_json: bool = False
    debug: bool = False


def work(order: Order) -> int:
    """Do this rank's part of the order and return the exit code; errors are one line each."""
    try:
        with process_group(_PATIENCE_S + order.seconds) as group:
            problem = _problem(order, group)
            if problem is None:
                _carry_out(order, group)
    except WorkersFailed as error:
        return error.exit_code
    except PacelineError as error:
        return _say(order, str(error), 2 if isinstance(error, InvalidInput) else 1)
    except Exception as error:
        rank = os.environ.get("RANK", "0")
        return _say(order, f"internal error in worker {rank}: {error!r} (--debug shows where)", 1)
    if problem is None:
        return 0
    return _say(order, problem, 2) if group.rank == 0 else 2


def _say(order: Order, message: str, exit_code: int) -> int:
    if order.debug:
        traceback.print_exc()
    sys.stderr.write(f"paceline: {message}\n")
    return exit_code


def _problem(order: Order, group: Group) -> str | None:
    """Return on all ranks why the first, which writes the file, cannot, if so."""
    problem = None
    if group.rank == 0:
        try:
            check_output(order)
        except InvalidInput as error:
            problem = str(error)
    found: str | None = group.gather(problem)[0]
    return found


def _carry_out(order: Order, group: Group) -> None:
    err = console(stderr=True, quiet=group.rank != 0)
    err.print(f"measuring {order.workers} x {group.device.type}, for about {order.seconds:g} s")
    machine = measure(order, group)
    if group.rank == 0:
        write(order, machine)


def check_output(order: Order) -> None:
    """Raise InvalidInput if the file cannot be made, or is there and may not be replaced."""
    path = order.output
    if path.is_dir():
        raise InvalidInput(f"output: {path} is a folder; name a file, such as {path / 'this.toml'}")
    if not path.parent.is_dir():
        raise InvalidInput(f"output: there is no folder {path.parent}; make it first")
    if path.exists() and not order.force:
        raise InvalidInput(
            f"output: {path} is there already; name another file, or replace it with --force"
        )


def write(order: Order, machine: Machine) -> None:
    """Write the file, and say so; InvalidInput if it cannot be written."""
    try:
        with order.output.open("w" if order.force else "x", encoding="utf-8") as file:
            file.write(machine_text(machine, _COMMENT))
    except OSError as error:
        raise InvalidInput(f"output: {order.output} cannot be written: {error.strerror}") from None
    out = console()
    if order.as_json:
        content = {"file": str(order.output), "machine": machine.model_dump(mode="json")}
        out.print_json(data=content)
        return
    out.print(summary(machine), soft_wrap=True)
    out.print(f"written {order.output}", soft_wrap=True)


def measure(order: Order, group: Group) -> Machine:
    """Measure all ranks' devices and hosts, and the links between them, collectively."""
    place = find_place(group)
    cores = place.num_cores  # before each rank gets its own
    share_cores(group.device)
    each = order.seconds / _NUM_MEASURED
    on_device = Sampler(group, clock_for(group.device), each)
    on_host = Sampler(group, HostClock(), each)
    own = _figures(on_device, on_host, place, cores)
    rows = [RankFigures.model_validate(row) for row in group.gather(own.model_dump(mode="json"))]
    hosts = sorted({tuple(members) for members in group.gather(list(place.members))})
    how = said_how(own.facts)
    name = name_from(order.output.stem)
    machine = described(name, rows, hosts, group.device.type, how)
    if group.world_size == 1 and group.device.type == "cpu":
        return machine
    links = Links(machine, hosts, on_host, on_device, how).measure()
    return Machine.model_validate(machine.model_dump() | {"links": links})


def _figures(on_device: Sampler, on_host: Sampler, place: Place, cores: int) -> RankFigures:
    group = on_host.group
    on_gpu, several = group.device.type == "cuda", group.world_size > 1
    known = facts(group.device)
    is_first = group.rank == place.members[0]
    cpu = torch.device("cpu")
    return RankFigures(
        hostname=platform.node(),
        cores=cores,
        device_memory_bytes=_memory_nbytes(group.device, known["memory_bytes"], place),
        facts=known,
        device=measure_device(on_device, group.device),
        copies=measure_copies(on_host, place),
        sum_s=measure_sums(on_host) if several else None,
        codec_latencies=measure_codec_latencies(on_host, group.deadline_s) if several else {},
        host_codecs=measure_codecs(on_host, cpu, is_first) if on_gpu else {},
    )


def _memory_nbytes(device: torch.device, of_host: int, place: Place) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return of_host // len(place.members)


def main() -> None:
    """Carry out the order that the launcher gave as the only argument."""
    die_with_parent(int(os.environ["PACELINE_LAUNCHER"]))
    leave(work(Order.model_validate_json(sys.argv[1])))


if __name__ == "__main__":
    main()
