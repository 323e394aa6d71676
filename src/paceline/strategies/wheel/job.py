"""What a worker is told of a run when it is welcomed, and what messages are about."""

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.core.errors import InvalidInput
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.pace import Pace
from paceline.strategies.wheel.split import Purpose

PROTOCOL = "paceline wheel 2"


class Topic(StrEnum):
    """What a message between a body worker and the hub is about.

    A step is three requests: PARAMETERS, ACTIVATIONS (with the labels), GRADIENTS. Instead of the
    reply that it expects, a worker may get AGAIN: its step was given up, and it asks with BEGIN
    which one is its next; or REFUSED: it cannot take part, and the text says why. A child hub
    fetches WHOLE_PARAMETERS once, and gets them in reply to WHOLE_GRADIENTS from then on.
    """

    PARAMETERS = Purpose.BODY_PARAMETERS.value
    ACTIVATIONS = Purpose.ACTIVATIONS.value
    RESIDUALS = Purpose.RESIDUALS.value
    GRADIENTS = Purpose.BODY_GRADIENTS.value
    WHOLE_PARAMETERS = "whole-parameters"
    WHOLE_GRADIENTS = "whole-gradients"
    BEGIN = "begin"
    PROFILE = "profile"
    PROBE = "probe"
    CLOCK = "clock"
    BUFFERS = "buffers"
    DONE = "done"
    FAILED = "failed"
    AGAIN = "again"
    REFUSED = "refused"


class Job(BaseModel):
    """What all workers of a run have in common. `first` is the head's first layer.

    Data are loaded for samples of `input_shape`, if that is known. `boot_id` tells the hub's clock.
    Steps count from 0 over the whole run; `num_traced` of them are traced, from `first_traced` on.
    With a `pace` the run is a rehearsal: layers take its times, and nothing is learnt. In a tree,
    `place` is (number, count): its hub has that one of so many equal parts of the samples.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    num_classes: int | None
    data: str
    input_shape: tuple[int, ...] | None
    batch_size: Annotated[int, Field(ge=1)]
    epochs: Annotated[int, Field(ge=1)]
    seed: int
    first: str
    config: Wheel
    first_traced: Annotated[int, Field(ge=0)]
    num_traced: Annotated[int, Field(ge=0)]
    profile_s: Annotated[float, Field(ge=0)]
    boot_id: str
    pace: Pace | None = None
    place: tuple[int, int] = (0, 1)

    @property
    def num_parts(self) -> int:
        """In how many parts all hubs of a tree together cut each step's samples."""
        return self.place[1] * self.config.workers

    def part(self, worker: int) -> int:
        """Return the number of a worker's part."""
        return self.place[0] * self.config.workers + worker

    @property
    def traced(self) -> range:
        """The steps that are traced."""
        return range(self.first_traced, self.first_traced + self.num_traced)

    def packed(self) -> bytes:
        """Return the bytes that a worker is welcomed with."""
        return self.model_dump_json().encode()

    @classmethod
    def of(cls, packed: bytes) -> "Job":
        """Return the job of these bytes; InvalidInput if they are none."""
        try:
            return cls.model_validate_json(packed)
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            field = ".".join(str(part) for part in fault["loc"])
            raise InvalidInput(
                f"the hub's settings: {field}: {fault['msg']}; both sides need the same version"
            ) from None

    def workers_beside(self, worker: int) -> range:
        """Return the numbers of the workers that alternate on one device with this one."""
        lanes = self.config.lanes
        first = worker - worker % lanes
        return range(first, min(first + lanes, self.config.workers))


def seed_of(seed: int, worker: int, step: int) -> int:
    """Return the seed of a step's random numbers: a step that is done again draws the same ones."""
    return hash((seed, worker, step)) % 2**63
