"""One rank of a profile, from joining the others to writing the result.

`python -m paceline.profiling.rank` is how the launcher starts one. Rank 0 speaks for all.
"""

import os
import sys
from functools import partial

from pydantic import BaseModel, ConfigDict

from paceline.links.group import Group
from paceline.native import die_with_parent
from paceline.profile_settings import ProfileSettings
from paceline.profiling.here import profile_here
from paceline.profiling.rows import result_of
from paceline.profiling.subject import subject_of
from paceline.record.trace import write_trace
from paceline.runs import make_folder
from paceline.tables import console
from paceline.worker import as_rank, leave


class Order(BaseModel):
    """What the ranks are to do: profile, and write result and trace into the run's folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    settings: ProfileSettings
    run_id: str
    debug: bool = False


def _carry_out(order: Order, group: Group) -> None:
    settings = order.settings
    err = console(stderr=True, quiet=group.rank != 0)
    subject = subject_of(settings, group)
    # Made before the steps, not after them.
    folder = make_folder(settings, order.run_id) if group.rank == 0 else None
    workload = subject.workload
    err.print(
        f"{settings.model}: {workload.num_parameters:,} parameters in {len(workload.layers)} "
        f"layers; {settings.steps} steps as they are, and as many recorded"
    )
    findings = profile_here(settings, subject, group)
    result = result_of(settings, order.run_id, findings, group)
    if folder is not None:
        write_trace(folder / "trace.json", findings.blocks.timelines[-1:])
        (folder / "result.json").write_text(result.model_dump_json(indent=2) + "\n")


def main() -> None:
    """Carry out the order that the launcher gave as the only argument."""
    die_with_parent(int(os.environ["PACELINE_LAUNCHER"]))
    order = Order.model_validate_json(sys.argv[1])
    leave(as_rank(partial(_carry_out, order), order.settings.deadline_s, order.debug))


if __name__ == "__main__":
    main()
