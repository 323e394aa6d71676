"""Join a run of another process: as its worker, or as a hub that is its worker.

Settings of `paceline hub --connect`: descriptions of the fields are the help texts of the options.
"""

from pathlib import Path
from typing import Any

from pydantic import Field, TypeAdapter, ValidationError

from paceline.core.errors import InvalidInput
from paceline.core.reading import first_fault
from paceline.core.settings import Seconds
from paceline.rpc.connecting import ConnectingWorkers
from paceline.strategies.wheel.config import Wheel

# Modules that need torch: `take_part(settings, clients)`, and `serve_child(settings, progress)`.
WORKING, SERVING = "paceline.strategies.wheel.worker", "paceline.strategies.wheel.child"
_REFUSED = {  # of a child hub's options
    "workers": "options: workers is a setting of its own, not one of the strategy",
    "child_hubs": "child_hubs: plans and rehearsals have them; a hub's own are started one by one",
    "gather": "options: gather is a setting of its own, not one of the strategy",
    "hub": "options: hub names a host of a machine file; a run's hub is where it is started",
    "head": "head: the parent hub says where the model is cut",
    "staleness_decay": "staleness_decay: learning rates are the root hub's",
}


class ChildSettings(ConnectingWorkers):
    """The settings of `paceline hub --connect`: a hub that is worker `number` of another.

    `options` are fields of the strategy's configuration, for its own workers. Without `listen` it
    starts these itself, as the root of a rehearsal has it.
    """

    connect: str = Field(description="A parent hub, which takes this one for a worker.")
    listen: str | None = Field(
        None, description="The address to listen on, such as tcp://10.0.0.1:5555."
    )
    number: int = Field(0, ge=0, lt=2**32, description="The number of that worker.")
    gather: int | None = Field(
        None, ge=1, description="Steps that go to the parent together; one of each worker."
    )
    parent_keys: Path | None = Field(
        None, description="The folder with the parent's hub.pub, and a worker.key."
    )
    workers: int = Field(2, ge=1, le=4096, description="Body workers, over all machines.")
    options: dict[str, Any] = Field({}, description="Fields of the strategy's configuration.")
    deadline_s: Seconds = Field(30.0, description="How long the parent may not answer.")
    wait_s: Seconds = Field(600.0, description="How long to wait for workers.")

    @property
    def numbers(self) -> tuple[int, ...]:
        """The number of the parent's worker that it is."""
        return (self.number,)

    def config(self, head: str | None = None) -> Wheel:
        """Return its own workers' configuration, with its parent's `head`, or InvalidInput."""
        for field, why in _REFUSED.items():
            if field in self.options:
                raise InvalidInput.of(why)
        values = self.options | {"workers": self.workers, "head": head}
        try:
            return TypeAdapter(Wheel).validate_python(values)
        except ValidationError as error:
            raise InvalidInput("strategy wheel", first_fault(error)) from None
