"""Child hubs at their parent: they bring gradients of all parameters, and get the parameters.

To the parent a child hub is one worker, whose head is not here.
"""

from paceline.core.errors import InvalidInput
from paceline.strategies.wheel.coding import buffer_of
from paceline.strategies.wheel.gathered import GRADIENTS, PARAMETERS, Arrived, Crossed
from paceline.strategies.wheel.half import load_buffers
from paceline.strategies.wheel.job import Topic
from paceline.strategies.wheel.server import ParameterServer
from paceline.strategies.wheel.tally import Learnt
from paceline.wire.messages import Message


class Trunk:
    """Answers child hubs, beside the parameter server. `workers` are those that were one.

    None has more than `num_steps` steps to do.
    """

    def __init__(self, server: ParameterServer, num_steps: int) -> None:
        self._server, self._num_steps = server, num_steps
        self.crossed = Crossed()
        self.workers: set[int] = set()

    @property
    def travelled(self) -> int:
        """Bytes that went to and from child hubs so far."""
        return self.crossed.nbytes.total()

    def fetch(self, worker: int, message: Message) -> Message:
        """Return all parameters as they are now."""
        self.workers.add(worker)
        version, body, head = self._server.whole()
        parts = tuple(buffer_of(values.cpu()) for values in (body, head))
        self.crossed.note(PARAMETERS, parts)
        return Message(Topic.WHOLE_PARAMETERS.value, message.step, version, parts=parts)

    def finish(self, worker: int, step: int) -> None:
        """Note that a worker is done; a child hub says after which step."""
        self._check(step)
        self._server.passed(worker, step)

    def update(self, worker: int, message: Message, *, is_first: bool) -> dict[int, Learnt]:
        """Update all parameters with what a child hub has gathered; return what it learnt by epoch.

        The buffers are taken from the first worker. InvalidInput if something does not fit,
        NonFinite if a value is NaN or infinite.
        """
        self._check(message.step)
        _, body, head = self._server.whole()
        arrived = Arrived.of(message, body, head)
        self._server.merge(worker, message.step, arrived.gathered, arrived.progress)
        self.crossed.note(GRADIENTS, message.parts[: len(GRADIENTS)])
        if is_first:
            halves = self._server.halves
            for half, part in zip((halves.body, halves.head), arrived.buffers, strict=True):
                load_buffers(half, part)
        return arrived.gathered.learnt

    def _check(self, step: int) -> None:
        if not 0 <= step <= self._num_steps:
            raise InvalidInput(f"step: {step} is none of the run's {self._num_steps}")
