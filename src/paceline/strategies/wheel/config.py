"""The configuration of strategy wheel, and the description of a run for all its processes."""

from dataclasses import replace
from math import ceil, gcd
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from paceline.core.cutting import LayerName
from paceline.core.errors import InvalidInput
from paceline.core.reading import read_record
from paceline.core.settings import Record
from paceline.core.wire_format import Purpose, check_codec

# Of sgd, where nobody gives one: with gradients that come late, lr / (1 - momentum) has to be about
# half of what is right with 0.9 and gradients that do not (docs/strategies/wheel.md).
MOMENTUM = 0.8
_Codec = Annotated[str, AfterValidator(check_codec)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Wheel:
    """The placement of workers, the cut of the model, and codecs of what travels.

    `workers` train the body; each has a head worker at the hub. `lanes` of them alternate on one
    device; with one lane, which cannot alternate, a step uses the weights of the step before.
    `hub` is the host of the parameter server and the head workers, by default that of the machine's
    first device; they compute on its first device, and the bodies on the machine's other devices.
    In a tree of hubs the workers are shared equally by `child_hubs`, each on a device of its own;
    a child sends its parent the mean gradients of `gather` steps, by default one of each worker.
    `head` is the head's first layer, by default found by `split`; "loss" leaves all layers to the
    bodies, and the hub computes the loss alone: asynchronous data parallelism. `server_memory` is
    where the parameter server keeps all parameters, what they are updated with and gradients that
    wait: on the hub's "device", or in the memory of its "host", if the device is too small; then
    the head's parameters are copied to the device for each answer (section 3.4.2). `activations`,
    `parameters`, `activation_gradients` and `gradients` (of the body) are the codecs by which each
    travels.

    Of a run, not of the plan: no worker begins a step more than `staleness` steps before the
    slowest has completed as many; None lets it. With 0 child hubs wait for their parent's reply,
    and so they do in a plan. The learning rate of an update whose gradients miss k updates is
    divided by 1 + k * `staleness_decay`.
    """

    workers: Annotated[int, Field(ge=1)] = 2
    lanes: Annotated[int, Field(ge=1)] = 2
    child_hubs: Annotated[int, Field(ge=0, le=4096)] = 0
    gather: Annotated[int, Field(ge=1)] | None = None
    hub: str | None = None
    head: LayerName | None = None
    server_memory: Literal["device", "host"] = "device"
    activations: _Codec | None = None
    activation_gradients: _Codec | None = None
    parameters: _Codec | None = None
    gradients: _Codec | None = None
    staleness: Annotated[int, Field(ge=0)] | None = 16
    staleness_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0

    @property
    def codecs(self) -> dict[Purpose, str]:
        """The codec of each purpose that has one."""
        named = {
            Purpose.ACTIVATIONS: self.activations,
            Purpose.ACTIVATION_GRADIENTS: self.activation_gradients,
            Purpose.PARAMETERS: self.parameters,
            Purpose.GRADIENTS: self.gradients,
        }
        return {purpose: codec for purpose, codec in named.items() if codec is not None}

    def check_tree(self) -> None:
        """Raise InvalidInput if the hubs are none that a tree can have."""
        if self.gather is not None and not self.child_hubs:
            raise InvalidInput("gather", "goes only with child_hubs, which gather steps")
        if self.child_hubs and self.workers % self.child_hubs:
            raise InvalidInput(
                "child_hubs",
                f"{self.workers} workers cannot be shared equally by {self.child_hubs}",
            )
        if self.staleness == 0 and self.lanes > 1:
            raise InvalidInput(
                "staleness",
                "lanes that alternate fetch a step ahead",
                hint="allow at least 1, or take lanes=1",
            )

    @property
    def workers_of_hub(self) -> int:
        """The workers of each hub."""
        return self.workers // max(1, self.child_hubs)

    @property
    def gathered(self) -> int:
        """The steps whose mean gradients a child hub sends to its parent."""
        return self.gather or self.workers_of_hub

    @property
    def period(self) -> int:
        """The number of steps after which the exchanges of a tree repeat themselves."""
        return self.gathered // gcd(self.gathered, self.workers_of_hub) if self.child_hubs else 1

    @property
    def workers_by_hub(self) -> dict[int, range]:
        """The workers of each hub that has any, by the number of its device."""
        if not self.child_hubs:
            return {0: range(self.workers)}
        own = self.workers_of_hub
        step = 1 + ceil(own / self.lanes)
        return {1 + i * step: range(i * own, (i + 1) * own) for i in range(self.child_hubs)}

    def devices_of(self, workers: range) -> dict[int, int]:
        """Return the devices of a hub's workers, each with the first of its own."""
        by_device = self.workers_by_device.items()
        return {number: own[0] for number, own in by_device if own[0] in workers}

    @property
    def of_root(self) -> "Wheel":
        """The configuration of a tree's root, whose workers are the child hubs."""
        if not self.child_hubs:
            return self
        return replace(self, workers=self.child_hubs, lanes=1, child_hubs=0, gather=None)

    @property
    def of_child(self) -> "Wheel":
        """The configuration of a tree's child hubs."""
        return replace(self, workers=self.workers_of_hub, child_hubs=0, gather=None)

    @property
    def workers_by_device(self) -> dict[int, range]:
        """The workers that alternate on each body device.

        Devices are counted: the root hub's is 0, and those of a hub's workers follow its own.
        """
        return {
            number: own[i : i + self.lanes]
            for hub, own in self.workers_by_hub.items()
            for number, i in enumerate(range(0, len(own), self.lanes), hub + 1)
        }


class PaceSpec(Record):
    """The seconds of the whole model's layers, body and then head, and of an update.

    They are those of `samples`, each of `input_shape` if the model does not know it, and with
    targets of `target_nbytes`.
    """

    samples: Annotated[int, Field(ge=1)]
    target_nbytes: Annotated[int, Field(ge=0)]
    input_shape: tuple[int, ...] | None
    forward_s: tuple[_Seconds, ...]
    backward_s: tuple[_Seconds, ...]
    update_s: _Seconds


class RunSpec(Record):
    """The part of a run that all its workers must know; none of it is secret, or a path.

    `model`, `data` and `seed` name the recipe (`paceline.training.recipes.named`). `config` names
    the head's first layer. `boot_id` tells the hub's clock from others. Steps count from 0 over the
    whole run, which has `num_steps`; `num_traced` of them are traced, from `first_traced` on. With
    a `pace` the run is a rehearsal: layers take its times, and nothing is learnt. In a tree of
    hubs, `place` is (number, count): the hub has that one of so many equal parts of the samples.
    `tree` is the configuration of a whole tree that is rehearsed, of which `config` is the hub's
    own part.
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
        """The head's first layer, or "loss"."""
        assert self.config.head is not None
        return self.config.head

    @property
    def num_parts(self) -> int:
        """The number of parts into which all hubs of a tree together cut each step's samples."""
        return self.place[1] * self.config.workers

    def part(self, worker: int) -> int:
        """Return the number of a worker's part."""
        return self.place[0] * self.config.workers + worker

    @property
    def traced(self) -> range:
        """The steps that are traced."""
        return range(self.first_traced, self.first_traced + self.num_traced)

    @classmethod
    def from_json(cls, data: bytes) -> "RunSpec":
        """Return the run of which a hub has told; InvalidInput if it is none."""
        return read_record(TypeAdapter(cls), data, "the hub's settings")

    def seed_of(self, worker: int, step: int) -> int:
        """Return the seed of a worker's step: a step that is done again draws the same numbers."""
        return hash((self.seed, self.part(worker), step)) % 2**63
