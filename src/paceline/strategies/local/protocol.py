"""The messages between the hub and its workers, as records that are checked when they come.

    worker                                    hub
    BEGIN layout ----------------------->     ... until the border of a round
         <------ STATE: the group's parameters and momentum, and what this worker had saved
    ROUND k ---------------------------->
         <------ UNITS
    PART e: outer gradient, losses ----->     ... until all parts of exchange e are there
         <------ PARTS: those of the others, and whether to test or to save
    TESTED, SAVED ---------------------->
    DONE trace ------------------------->

Instead of a reply a worker may get AGAIN: it is not counted on at present, and asks with BEGIN.
"""

import json
from collections.abc import Sequence
from enum import StrEnum
from math import nan
from typing import Annotated, Literal, NamedTuple, TypeVar

import torch
from pydantic import BeforeValidator, Field, TypeAdapter
from torch import Tensor

from paceline.codecs.codec import Payload
from paceline.core.cost import PacedDevice
from paceline.core.errors import InvalidInput
from paceline.core.reading import read_record
from paceline.core.settings import Record, RehearseSettings, TrainSettings
from paceline.exchange.setup import TrainingSetup
from paceline.rpc import workers
from paceline.rpc.frames import Buffer, Message
from paceline.rpc.reading import Seconds
from paceline.strategies.local.config import Local

_MOST = 2**53  # of counts: beyond it JSON numbers are not exact everywhere
Count = Annotated[int, Field(ge=0, le=_MOST)]
# Of a run that diverges; JSON has no NaN, and no infinite numbers.
Number = Annotated[float, BeforeValidator(lambda value: nan if value is None else value)]
Header = TypeVar("Header", bound=Record)


class Topic(StrEnum):
    """The subject of a message between a worker and the hub."""

    BEGIN = "begin"
    STATE = "state"
    ROUND = "round"
    UNITS = "units"
    PART = "part"
    PARTS = "parts"
    TESTED = "tested"
    SAVED = "saved"
    DONE = "done"
    PROFILE = "profile"
    PROBE = "probe"
    CLOCK = "clock"
    FAILED = workers.FAILED


class RunSpec(Record):
    """The part of a run that all its workers must know; none of it is secret, or a path.

    `settings` are the run's without its folders and addresses. `num_units`: of the whole run
    (`Units`). `device`: in a rehearsal, the one whose times layers take. `boot_id` tells the hub's
    clock from others. With `profiles` a worker measures itself first.
    """

    strategy: Literal["local"] = "local"
    settings: Annotated[TrainSettings | RehearseSettings, Field(discriminator="kind")]
    config: Local
    num_units: Annotated[int, Field(ge=1, le=_MOST)]
    device: PacedDevice | None
    boot_id: str
    profiles: bool


class Loss(Record):
    """The samples of an epoch that a worker has trained on, and the sum of their losses."""

    epoch: Count
    num_samples: Count
    total: Number


class PartHeader(Record):
    """What goes before a worker's outer gradient.

    `weight`: the samples of its inner steps since it sent this fragment last. `digest` is that of
    the fragment of the exchange before. Without `is_finite` no gradient follows. `step_s`: the
    seconds of an inner step.
    """

    weight: Count
    num_steps: Count
    is_finite: bool = True
    digest: str | None = Field(None, max_length=64)
    step_s: Seconds | None = None
    losses: tuple[Loss, ...] = Field((), max_length=4096)
    num_buffers: Annotated[int, Field(ge=0, le=4)] = 0


class Share(Record):
    """A worker's part of an exchange as it travels to the others: its weight and its buffers."""

    worker: Count
    weight: Count
    sizes: tuple[Count, ...] = Field((), max_length=4)


class PartsHeader(Record):
    """What goes before the others' outer gradients: all shares in the workers' order.

    `test`: the part (number, count) of the test samples that this worker tests after the exchange.
    """

    shares: tuple[Share, ...]
    test: tuple[Count, Count] | None = None
    save: bool = False


class StateHeader(Record):
    """What goes before the group's state: the exchange that comes next.

    `place` (round, step) and `units` are those of the worker's own state, if there is one.
    """

    exchange: Count
    place: tuple[Count, Count] | None = None


class UnitsHeader(Record):
    """The units of a round. `first_step`: the steps of the run before it.

    `num_steps`: the steps of the run that the round is, of all workers together.
    """

    units: tuple[Count, ...]
    first_step: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    num_steps: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    is_over: bool = False


class Tested(Record):
    """The summed loss and score of a worker's part of the test samples."""

    num_samples: Count
    loss: Number
    score: Number


class SavedHeader(Record):
    """What goes before a worker's own state after an exchange: where it is in which round."""

    round: Count
    step: Count


class OwnState(NamedTuple):
    """A worker's own state as it travels: where it is, its tensors as safetensors, and values."""

    header: SavedHeader
    tensors: bytes
    values: bytes


class Done(Record):
    """The end of a worker's run: the digest of the last fragment that it took from the group."""

    digest: str | None = Field(None, max_length=64)


def encode(header: Record) -> memoryview:
    """Return a header as the first part of a message."""
    return memoryview(header.model_dump_json().encode())


def decode(kind: type[Header], message: Message) -> Header:
    """Return the header in the first part of a message; InvalidInput if there is none."""
    part = memoryview(message.parts[0]) if message.parts else memoryview(b"")
    return read_record(TypeAdapter(kind), part, message.topic)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def tensor_of(part: Buffer) -> Tensor:
    """Return the bytes of a part as a tensor, in its memory where that can be written to."""
    view = memoryview(part)
    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)


def vectors_of(part: Buffer, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the vectors that follow one another in a part; InvalidInput if it has other bytes."""
    sizes = [one.nbytes for one in like]
    whole = tensor_of(part)
    if whole.numel() != sum(sizes):
        raise InvalidInput("state", f"{whole.numel():,} bytes where {sum(sizes):,} belong")
    pairs = zip(whole.split(sizes), like, strict=True)
    # A copy: a view as another type has to be aligned.
    return [own.clone().view(one.dtype).view(one.shape) for own, one in pairs]


def joined(tensors: Sequence[Tensor]) -> memoryview:
    """Return the bytes of tensors, one after another, in memory of their own."""
    if not tensors:
        return memoryview(b"")
    return bytes_of(
        torch.cat([one.detach().cpu().reshape(-1).view(torch.uint8) for one in tensors])
    )


def payload_of(codec: str, count: int, dtype: torch.dtype, buffers: Sequence[Tensor]) -> Payload:
    """Return a payload of so many values; without a codec, of the values themselves.

    Raises InvalidInput if the bytes of the values are fewer or more.
    """
    if not codec:
        nbytes = sum(one.numel() for one in buffers)
        if len(buffers) != 1 or nbytes != count * dtype.itemsize:
            raise InvalidInput(
                "part",
                f"{nbytes:,} bytes in {len(buffers)} buffers",
                hint=f"{count:,} values are {count * dtype.itemsize:,} in one",
            )
    return Payload(codec, count, tuple(buffers))


def layout_of(setup: TrainingSetup, spec: RunSpec) -> str:
    """Return the layout on which worker and hub must agree to train one model, as JSON."""
    named = setup.model.named_parameters()
    return json.dumps(
        {
            # After a restart of the machine the hub goes on with another boot_id.
            "settings": spec.model_dump(mode="json", exclude={"boot_id"}),
            "parameters": {name: f"{one.dtype} {list(one.shape)}" for name, one in named},
            "samples": None if setup.recipe is None else len(setup.recipe.samples),
        }
    )
