"""Define how a process joins the run of a hub in another process, as a worker or a child hub."""

from pathlib import Path
from typing import Any

from pydantic import Field

from paceline.core.errors import InvalidInput
from paceline.core.reading import validated
from paceline.core.settings import Seconds
from paceline.rpc.connecting import ConnectingWorkers
from paceline.strategies.wheel.config import Wheel

# Modules that workers (WORKING) and child hubs (SERVING) run; not imported, to avoid torch.
WORKING, SERVING = "paceline.strategies.wheel.worker", "paceline.strategies.wheel.child"
_REFUSED = {  # options that a child hub cannot have, with hints
    "workers": "use --workers",
    "child_hubs": "start each child hub with --parent",
    "gather": "add ?gather=N to the URL of --parent",
    "hub": "it applies to plans",
    "head": "set it at the root hub",
    "staleness_decay": "set it at the root hub",
}


class ChildSettings(ConnectingWorkers):
    """The settings of `paceline hub --parent`, a hub that is a worker of a parent hub.

    `number`: index of this hub among the parent's workers, from 0. `options`: the strategy's
    options for this hub's workers. Without `listen`, as in rehearsals, this hub starts its workers.
    """

    connect: str = Field(description="Address of the parent hub, of which this hub is a worker.")
    listen: str | None = Field(
        None, description="Address to listen on for workers, such as tcp://10.0.0.1:5555."
    )
    number: int = Field(
        0, ge=0, lt=2**32, description="Index of this hub among the parent's workers, from 0."
    )
    gather: int | None = Field(
        None,
        ge=1,
        description="How many steps of workers make one mean gradient for the parent hub. "
        "Default: --workers.",
    )
    parent_keys: Path | None = Field(
        None, description="Folder with the parent's hub.pub and this hub's worker.key."
    )
    workers: int = Field(
        2, ge=1, le=4096, description="Number of workers of this hub, on all machines."
    )
    options: dict[str, Any] = Field({}, description="Options of strategy wheel for this hub.")
    deadline_s: Seconds = Field(
        30.0, description="Time without an answer from the parent after which this hub gives up."
    )
    wait_s: Seconds = Field(600.0, description="Longest time to wait for workers to join.")

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the parent's workers in this process: only this hub's index."""
        return (self.number,)

    def config(self, head: str | None = None) -> Wheel:
        """Return this hub's configuration with the parent's head; InvalidInput for bad options."""
        for name, hint in _REFUSED.items():
            if name in self.options:
                raise InvalidInput("options", f"cannot set {name} for a child hub", hint=hint)
        own = {"workers": self.workers, "head": head, "gather": self.gather}
        return validated(Wheel, self.options | own)
