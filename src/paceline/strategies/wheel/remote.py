"""Join the run of a hub in another process, as a worker or as a child hub."""

from pathlib import Path
from typing import Any

from pydantic import Field, TypeAdapter, ValidationError

from paceline.core.errors import InvalidInput
from paceline.core.reading import first_fault
from paceline.core.settings import Seconds
from paceline.rpc.connecting import ConnectingWorkers
from paceline.strategies.wheel.config import Wheel

# Names of the modules with `take_part(settings, clients)` and `serve_child(settings, progress)`.
# This module does not import the two modules, because the two import torch.
WORKING, SERVING = "paceline.strategies.wheel.worker", "paceline.strategies.wheel.child"
_REFUSED = {  # options that a child hub cannot have, and what to do instead
    "workers": "use --workers",
    "child_hubs": "start each child hub with --parent",
    "gather": "add ?gather=N to the URL of --parent",
    "hub": "it applies to plans",
    "head": "set it at the root hub",
    "staleness_decay": "set it at the root hub",
}


class ChildSettings(ConnectingWorkers):
    """The settings of `paceline hub --parent`: a hub that is a worker of another hub.

    `number`: this hub's number among the parent's workers. `options`: the strategy's options for
    this hub's own workers. Without `listen`, as in rehearsals, this hub starts its workers itself.
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
        """This hub's number among the parent's workers, as the only element."""
        return (self.number,)

    def config(self, head: str | None = None) -> Wheel:
        """Return the configuration of this hub's workers, with the parent's `head`."""
        for name, hint in _REFUSED.items():
            if name in self.options:
                raise InvalidInput("options", f"cannot set {name} of a child hub", hint=hint)
        values = self.options | {"workers": self.workers, "head": head}
        try:
            return TypeAdapter(Wheel).validate_python(values)
        except ValidationError as error:
            raise InvalidInput.of(first_fault(error)) from None
