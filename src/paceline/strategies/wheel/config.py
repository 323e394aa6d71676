"""The settings of strategy wheel, and the description of a run for its processes."""

from dataclasses import replace
from math import ceil, gcd
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from paceline.core.cutting import LayerName
from paceline.core.errors import InvalidInput
from paceline.core.reading import read_record
from paceline.core.settings import Record
from paceline.core.wire_format import CodecName, Purpose

# The default momentum of SGD. Stale gradients need about half of the usual lr / (1 - momentum).
# With momentum 0.8 instead of 0.9 and the same lr, it is halved (docs/strategies/wheel.md).
MOMENTUM = 0.8
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Wheel:
    """Where body (first layers) and head (last layers) of a model train, and with which codecs.

    `workers`: the number of workers. Each worker trains the body; the hub trains the head.
    `lanes`: the number of workers that alternate on one device. With `lanes=1`, a worker begins its
    next step after the update of its previous step.
    `hub`: the host of the parameter server and the head; None: the host of the first device. The
    head computes on the first device of this host, workers on the machine's other devices.
    `child_hubs`: the number of hubs between the workers and the root hub; 0: none. A child hub has
    a separate device and an equal share of the workers.
    `gather`: the number of workers' steps over which a child hub averages the gradients for its
    parent; None: the number of its workers.
    `head`: the name of the head's first layer; None: chosen to send few bytes (`split`). With
    "loss", the body has all layers, so the run is asynchronous data parallelism.
    `server_memory`: where the server keeps parameters, optimizer state and waiting gradients. With
    "host", the hub copies the head's parameters to its device for each batch (section 3.4.2).
    `activations`, `activation_gradients`: the codecs of activations and their gradients.
    `parameters`, `gradients`: the codecs of the body's parameters and gradients.
    `staleness`: the most steps that a worker may be ahead of the slowest worker; None: no limit.
    With 0, child hubs also wait for the parent's reply. Plans ignore limits above 0.
    `staleness_decay`: divides the learning rate of an update by 1 + k * `staleness_decay`, where k
    is the number of updates since the worker fetched its parameters. Plans ignore it.
    """

    workers: Annotated[int, Field(ge=1)] = 2
    lanes: Annotated[int, Field(ge=1)] = 2
    child_hubs: Annotated[int, Field(ge=0, le=4096)] = 0
    gather: Annotated[int, Field(ge=1)] | None = None
    hub: str | None = None
    head: LayerName | None = None
    server_memory: Literal["device", "host"] = "device"
    activations: CodecName | None = None
    activation_gradients: CodecName | None = None
    parameters: CodecName | None = None
    gradients: CodecName | None = None
    staleness: Annotated[int, Field(ge=0)] | None = 16
    staleness_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0

    @property
    def codecs(self) -> dict[Purpose, str]:
        """The chosen codecs by purpose of message; purposes without a codec are left out."""
        named: dict[Purpose, str | None] = {one: getattr(self, one, None) for one in Purpose}
        return {purpose: codec for purpose, codec in named.items() if codec is not None}

    def check_tree(self) -> None:
        """Raise InvalidInput if the values of workers, lanes, child_hubs or others conflict."""
        if self.gather is not None and not self.child_hubs:
            raise InvalidInput("gather", "requires child_hubs")
        if self.child_hubs and self.workers % self.child_hubs:
            problem = f"must divide workers={self.workers}"
            raise InvalidInput("child_hubs", problem, got=self.child_hubs)
        if self.staleness == 0 and self.lanes > 1:
            problem = f"must be at least 1 with lanes={self.lanes}"
            raise InvalidInput("staleness", problem, got=0, hint="or set lanes=1")

    @property
    def workers_of_hub(self) -> int:
        """The number of workers per child hub; without child hubs, all workers."""
        return self.workers // max(1, self.child_hubs)

    @property
    def gathered(self) -> int:
        """The number of steps in each mean of gradients that a child hub sends to its parent."""
        return self.gather or self.workers_of_hub

    @property
    def period(self) -> int:
        """The number of steps after which the pattern of exchanges between hubs repeats."""
        return self.gathered // gcd(self.gathered, self.workers_of_hub) if self.child_hubs else 1

    @property
    def workers_by_hub(self) -> dict[int, range]:
        """The workers that each hub serves directly; the key is the number of the hub's device.

        With child hubs, the root serves no workers directly and is left out.
        """
        if not self.child_hubs:
            return {0: range(self.workers)}
        own = self.workers_of_hub
        step = 1 + ceil(own / self.lanes)
        return {1 + i * step: range(i * own, (i + 1) * own) for i in range(self.child_hubs)}

    @property
    def of_root(self) -> "Wheel":
        """The configuration of a tree's root hub, whose workers are the child hubs."""
        if not self.child_hubs:
            return self
        return replace(self, workers=self.child_hubs, lanes=1, child_hubs=0, gather=None)

    @property
    def of_child(self) -> "Wheel":
        """The configuration of each child hub in a tree of hubs."""
        return replace(self, workers=self.workers_of_hub, child_hubs=0, gather=self.gathered)

    @property
    def workers_by_device(self) -> dict[int, range]:
        """The workers that compute on each device; the key is the device's number.

        Device 0 belongs to the root hub. A child hub's device precedes its workers' devices.
        """
        return {
            number: own[i : i + self.lanes]
            for hub, own in self.workers_by_hub.items()
            for number, i in enumerate(range(0, len(own), self.lanes), hub + 1)
        }


class PaceSpec(Record):
    """The times that layers and updates sleep in a rehearsal, instead of computing.

    `forward_s`, `backward_s`: the seconds of each layer for `samples` samples, in the order of the
    model. `update_s`: the seconds of an update. `input_shape`: the shape of a sample's input, if
    the model does not define this shape. `target_nbytes`: the bytes of a sample's targets.
    """

    samples: Annotated[int, Field(ge=1)]
    target_nbytes: Annotated[int, Field(ge=0)]
    input_shape: tuple[int, ...] | None
    forward_s: tuple[_Seconds, ...]
    backward_s: tuple[_Seconds, ...]
    update_s: _Seconds


class RunSpec(Record):
    """The description of a run that the hub sends to all workers.

    The description contains neither secrets nor paths. `model`, `data`, `seed`: define the recipe
    (`paceline.training.recipes.named`). `config`: the configuration of this hub and its workers, in
    which `head` is set. `num_steps`: the number of steps of the whole run. `profile_s`: the time
    for which each device measures its speed. `boot_id`: identifies the clock of the hub's machine.
    `pace`: in a rehearsal, the times of layers. `place`: a pair (i, n): this hub's workers train on
    part i of n equal parts of the samples. `tree`: in a rehearsal with child hubs, the
    configuration of the whole tree.
    """

    strategy: Literal["wheel"] = "wheel"
    model: str
    data: str | None
    batch_size: Annotated[int, Field(ge=1)]
    num_steps: Annotated[int, Field(ge=1)]
    seed: int
    precision: Literal["float32", "bfloat16"] = "float32"
    config: Wheel
    first_traced: Annotated[int, Field(ge=0)] = 0
    num_traced: Annotated[int, Field(ge=0)] = 0
    profile_s: Annotated[float, Field(ge=0)]
    boot_id: str
    pace: PaceSpec | None = None
    place: tuple[int, int] = (0, 1)
    tree: Wheel | None = None

    @property
    def head(self) -> str:
        """The name of the head's first layer, or "loss"."""
        assert self.config.head is not None
        return self.config.head

    @property
    def num_parts(self) -> int:
        """The number of parts of a step's samples: one per worker of this hub and its siblings."""
        return self.place[1] * self.config.workers

    def part(self, worker: int) -> int:
        """Return the index, below `num_parts`, of a worker's part of a step's samples."""
        return self.place[0] * self.config.workers + worker

    @property
    def traced(self) -> range:
        """The numbers of the steps whose computation and messages are recorded."""
        return range(self.first_traced, self.first_traced + self.num_traced)

    @classmethod
    def from_json(cls, data: bytes) -> "RunSpec":
        """Parse a hub's description of its run."""
        return read_record(TypeAdapter(cls), data, "hub settings")

    def seed_of(self, worker: int, step: int) -> int:
        """Return the random seed of a worker's step; a repeated step has the same seed."""
        return hash((self.seed, self.part(worker), step)) % 2**63
