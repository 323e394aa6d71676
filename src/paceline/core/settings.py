"""The settings of a run: read by every strategy, and checked against it in `records.settings`.

Descriptions of the fields are the help texts of the command line, whose options are made from them.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from paceline.core.errors import shown
from paceline.core.interval import LONGEST_S, Interval

LARGEST_FLOAT32 = 3.4e38
_MOST_WORKERS, _LONGEST_LIST = 10**6, 100_000  # characters of a list of workers
Seconds = Annotated[float, Field(gt=0, le=LONGEST_S)]
Milliseconds = Annotated[float, Field(gt=0, le=1e3 * LONGEST_S)]
Shape = tuple[Annotated[int, Field(ge=1)], ...]
DATA = (
    "digits; synthetic:3x224x224,classes=10,samples=512, each part optional; images:FOLDER, with a "
    "folder for each class; libsvm:PATH. For language models: text, the source text of Python's "
    "standard library; text:PATH, a file or a folder; tokens:PATH.npy; masked-text, for masked "
    "language models. By default the model's own: digits for images, text for gpt."
)


def read_shape(shape: Any) -> Any:
    """Return the sizes of a shape that is written as 3x224x224."""
    if not isinstance(shape, str):
        return shape
    try:
        return tuple(int(size) for size in shape.split("x"))
    except ValueError:
        raise ValueError(f"{shape!r} is not a shape such as 3x224x224") from None


def read_list(values: Any) -> Any:
    """Return the words of a list that is written as 1,2,4."""
    return tuple(part.strip() for part in values.split(",")) if isinstance(values, str) else values


def _read_interval(every: Any) -> Any:
    """Return the text of an interval, which may be a number of steps."""
    if isinstance(every, int) and not isinstance(every, bool):
        every = str(every)
    if isinstance(every, str):
        Interval.parse(every)
    return every


def _each(stretch: Any) -> Any:
    """Return one factor a worker for a number (4), or for a text that lists them (1,4)."""
    if isinstance(stretch, str):
        return tuple(stretch.split(","))
    return (stretch,) if isinstance(stretch, int | float) else stretch


Model = Annotated[str, Field(description="A built-in name, or package.module:factory.")]
Port = Annotated[
    int,
    Field(ge=0, lt=65536, description="The loopback port where ranks meet; 0 takes a free one."),
]
InputShape = Annotated[
    Shape | None,
    BeforeValidator(read_shape),
    Field(description="Of one sample, such as 3x224x224; for a model of your own."),
]


class Record(BaseModel, frozen=True, extra="forbid"):
    """Settings or a result: immutable, and without unknown fields."""


class RunSettings(Record):
    """The settings that training and rehearsing have in common."""

    model: Model
    strategy: str = Field(
        "allreduce", description="How the workers share the work; train knows auto, too."
    )
    options: dict[str, Any] = Field({}, description="Fields of the strategy's configuration.")
    workers: int | str = Field(
        2, description="Worker processes; a strategy may take a list: cpu:1,cpu:2@slow=16,gpu:0."
    )
    batch_size: int = Field(64, ge=1, description="Samples of a step, over all workers.")
    policy: str | None = Field(None, description="The same as --set policy=POLICY.")
    codec: str | None = Field(
        None,
        description="How gradients travel, as dynamic8; of wheel and subbatch all that travels, as "
        "activations=dynamic8,gradients=half. The same as --set.",
    )
    balance: Literal["auto"] | None = Field(
        None, description="auto: the workers' parts of a batch follow their speeds."
    )
    exchange_alone: bool = Field(
        False, description="One worker exchanges with itself, so that its method's own cost shows."
    )
    profile_s: float = Field(
        4.0, ge=0, le=LONGEST_S, description="How long to profile before planning."
    )
    deadline_s: Seconds = Field(30.0, description="How long a worker may not answer.")
    wait_s: Seconds = Field(600.0, description="How long a hub waits for workers.")
    port: Port = 0
    bind: str | None = Field(
        None, description="The address of a hub for workers of other machines: tcp://10.0.0.1:5555."
    )
    keys: Path | None = Field(
        None, description="The folder of keys that paceline hub --generate-keys has written."
    )
    run: str | None = Field(None, description="The name that hub and workers give their run.")
    output: Path = Field(Path("runs"), description="Where the folder of the run is made.")

    @model_validator(mode="after")
    def _batch_fits_workers(self) -> Self:
        longest = len(str(_MOST_WORKERS)) if str(self.workers).isdecimal() else _LONGEST_LIST
        if len(str(self.workers)) > longest:
            raise ValueError(f"workers: {shown(self.workers)} are more than {_MOST_WORKERS:,}")
        if isinstance(self.workers, int) and self.workers < 1:
            raise ValueError(
                f"workers: Input should be greater than or equal to 1, not {self.workers}"
            )
        if isinstance(self.workers, int) and self.batch_size < self.workers:
            raise ValueError(
                f"batch_size: {self.batch_size} samples cannot be shared by {self.workers} workers"
            )
        if self.exchange_alone and self.workers != 1:
            raise ValueError(f"exchange_alone: is for one worker, not {self.workers}")
        if self.keys is not None and self.bind is None:
            raise ValueError("keys: are for workers of other machines; name the address by bind")
        return self


class TrainSettings(RunSettings):
    """The settings of `paceline train`.

    None stands for what suits the model, or is the recipe's own (`paceline.core.defaults`).
    """

    kind: Literal["train"] = "train"
    data: str | None = Field(None, description=DATA)
    epochs: int = Field(3, ge=1, description="Passes over the training samples.")
    steps: int | None = Field(None, ge=1, lt=2**63, description="Of the run, instead of epochs.")
    optimizer: str | None = Field(
        None,
        description="One of torch.optim, such as adamw, or package.module:factory; sgd, or adamw "
        "for gpt and vit.",
    )
    optimizer_options: dict[str, Any] = Field({}, description="Fields of the optimizer.")
    learning_rate: float | None = Field(
        None,
        gt=0,
        le=LARGEST_FLOAT32,
        description="For batches of the batch size. With sgd 0.05, 0.001 for alexnet; with adamw "
        "0.001 for gpt and vit, 0.0006 for gpt2; otherwise that of the optimizer.",
    )
    momentum: float | None = Field(
        None, ge=0, lt=1, description="Of an optimizer that has one; 0.9 for sgd."
    )
    schedule: str | None = Field(
        None,
        description="Of the learning rate: constant, cosine or linear (both to 0), or "
        "package.module:factory; constant.",
    )
    warmup_steps: int = Field(
        0, ge=0, lt=2**63, description="Over which the learning rate rises at first, linearly."
    )
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="Of forward and backward: bfloat16 is torch's autocast."
    )
    accumulate: int = Field(
        1, ge=1, description="Micro-batches into which each worker's part of a step is cut."
    )
    clip_norm: float | None = Field(
        None, gt=0, le=LARGEST_FLOAT32, description="The largest norm that all gradients may have."
    )
    evaluate_every: int | None = Field(
        None, ge=1, description="Steps after which the model is tested, beside each epoch's end."
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Of the weights, the split and the order.")
    force: bool = Field(False, description="Take workers that do not help, too.")
    checkpoint_every: Annotated[str, BeforeValidator(_read_interval)] = Field(
        "300s", description="When checkpoints are written: 500 (steps), 60s, 5min, 1h or never."
    )
    keep: int = Field(2, ge=1, description="The number of checkpoints that are kept.")
    resume: Path | None = Field(
        None,
        description="The folder of a run to go on with; what is not given is as it was there.",
    )
    restarts: int = Field(
        0, ge=0, description="How often a run that loses a worker begins again at a checkpoint."
    )
    elastic: bool = Field(
        False, description="Workers may be lost, and come back or join meanwhile; an extra."
    )
    lighthouse: str | None = Field(
        None,
        description="Where elastic workers find each other, as http://10.0.0.1:29510; by default "
        "all are of this machine.",
    )
    here: Annotated[tuple[Annotated[int, Field(ge=0)], ...] | None, BeforeValidator(_each)] = Field(
        None, description="The numbers of the elastic workers of this machine, as 2,3; else all."
    )
    tensorboard: Path | None = Field(
        None, description="Where a folder for TensorBoard is made; an extra."
    )

    @property
    def checkpoint_interval(self) -> Interval | None:
        """The time or the steps between two checkpoints; None if there are none."""
        return Interval.parse(self.checkpoint_every)

    @model_validator(mode="after")
    def _steps_fit(self) -> Self:
        if isinstance(self.workers, int) and self.batch_size < self.workers * self.accumulate:
            raise ValueError(
                f"accumulate: {self.batch_size} samples cannot be cut into {self.accumulate} "
                f"micro-batches of each of {self.workers} workers"
            )
        for name in ("lighthouse", "here"):
            if getattr(self, name) is not None and not self.elastic:
                raise ValueError(f"{name}: goes only with elastic")
        if self.steps is not None and self.warmup_steps >= self.steps:
            raise ValueError(
                f"warmup_steps: {self.warmup_steps} of {self.steps} steps; the rate has to reach "
                "its full height before the last one"
            )
        return self


class RehearseSettings(RunSettings):
    """The settings of `paceline rehearse`."""

    kind: Literal["rehearse"] = "rehearse"
    device: str | None = Field(
        None,
        description="Whose time layers take: a device of a machine file, or FILE.toml:NAME.",
    )
    stretch: Annotated[
        tuple[Annotated[float, Field(ge=1, le=LONGEST_S)], ...] | None, BeforeValidator(_each)
    ] = Field(None, description="Or compute here, each layer slowed 4 times; or 1,4 by worker.")
    forward_ms: Milliseconds | None = Field(None, description="What all layers take together.")
    backward_ms: Milliseconds | None = Field(None, description="What all layers take together.")
    update_ms: Milliseconds | None = Field(None, description="What the update takes.")
    input_shape: InputShape = None
    steps: int = Field(20, ge=3, description="How many are measured.")
    profile_s: float = Field(
        2.0, ge=0, le=LONGEST_S, description="How long to measure before the rehearsal."
    )

    @model_validator(mode="after")
    def _fields_fit(self) -> Self:
        if (self.device is None) == (self.stretch is None):
            both = "both are given" if self.device is not None else "neither is given"
            raise ValueError(
                f"device, stretch: {both}; a rehearsal paces layers as a device, or stretches them"
            )
        if self.device is None:
            self._only_with("device", "forward_ms", "backward_ms", "update_ms")
        else:
            self._only_with("stretch", "balance")
        if self.stretch is not None and len(self.stretch) not in (1, self.workers):
            raise ValueError(
                f"stretch: {len(self.stretch)} numbers for {self.workers} workers; give one for "
                "all, or one for each"
            )
        return self

    def _only_with(self, other: str, *names: str) -> None:
        for name in names:
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: goes only with {other}")

    def stretch_of(self, rank: int) -> float:
        """Return the factor by which a worker is slower than this machine; 1 if it is paced."""
        if self.stretch is None:
            return 1.0
        return self.stretch[rank if len(self.stretch) > 1 else 0]
