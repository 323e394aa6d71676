"""The state of a parameter server in a checkpoint.

    model, optimizer, schedule    as in every strategy (`exchange.learner`)
    random.safetensors, .json     the states of the random number generators
    server.json                   number of updates, progress of each worker, completed epochs

A checkpoint contains only completed steps: in a resumed run, workers repeat half-done steps.
"""

from collections.abc import Sequence

from paceline.checkpoints.state import random_state, restore_random_state
from paceline.core.errors import InvalidInput
from paceline.core.outcome import Epoch
from paceline.core.reading import validated
from paceline.core.settings import Record
from paceline.exchange.checkpoints import State
from paceline.exchange.learner import learned_state, load_learned_state
from paceline.rpc.workers import difference
from paceline.strategies.wheel.server import ALL_WORKERS, ParameterServer
from paceline.strategies.wheel.staleness import WorkerProgress

_SERVER = "server"  # the server's progress is in server.json


class ServerProgress(Record):
    """The progress of a parameter server after `version` updates.

    `layout`: the settings, parameters and data of the run, as JSON. `staleness[k]`: the number of
    updates whose gradients were computed with parameters that were k updates old.
    """

    layout: str
    version: int
    workers: Sequence[WorkerProgress]
    staleness: dict[int, int]
    epochs: list[Epoch]

    def epochs_over(self, steps_per_epoch: int) -> list[Epoch]:
        """Return the epochs that all workers have completed."""
        # Omit epochs that a slower worker has not completed: the resumed run tests them again.
        return self.epochs[: min(one.next_step for one in self.workers) // steps_per_epoch]


def state_of(server: ParameterServer, layout: str, epochs: Sequence[Epoch] = ()) -> State:
    """Return a checkpoint's content: the server's state, and this process's random states."""
    learned = learned_state(server.model, server.optimizer, server.schedule)
    of_random, random = random_state(server.device)
    tensors = {f"random/{name}": tensor for name, tensor in of_random.items()}
    progress = ServerProgress(
        layout=layout,
        version=server.version,
        workers=server.workers.all,
        staleness=dict(server.updates.staleness[ALL_WORKERS]),
        epochs=list(epochs),
    ).model_dump()
    parts = {_SERVER: progress, "random": random, "progress": {"strategy": "wheel"}}
    return State(learned.tensors | tensors, learned.parts | parts)


def load(state: State, server: ParameterServer, layout: str) -> ServerProgress:
    """Load a checkpoint into a new server, and return the progress in the checkpoint.

    Raises InvalidInput, and leaves the server unchanged, if the strategy, layout, model or
    optimizer in the checkpoint differs from the server's.
    """
    progress = validated(ServerProgress, state.own_part(_SERVER), "resume: server.json: ")
    if (other := difference(layout, progress.layout)) is not None:
        hint = "to start a new run, omit --resume"
        raise InvalidInput("resume", f"the checkpoint has other settings: {other}", hint=hint)
    if len(progress.workers) != len(server.workers.all):
        problem = f"the checkpoint must have the progress of {len(server.workers.all)} workers"
        raise InvalidInput("resume", problem, got=len(progress.workers))
    load_learned_state(state, server.model, server.optimizer, server.schedule)
    restore_random_state(server.device, state.file("random"), state.parts["random"])
    server.restore(progress.version, progress.workers, progress.staleness)
    return progress
