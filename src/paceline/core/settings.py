"""The settings of a run, validated against its strategy in `records.settings`.

Field descriptions are the help texts of the command line's options.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from paceline.core.errors import shown

LONGEST_S = 1e9  # larger values overflow clocks and timeouts
LARGEST_FLOAT32 = 3.4e38
_SECONDS_OF = {"s": 1.0, "min": 60.0, "h": 3600.0}
_STEPS = re.compile("[0-9]{1,18}")
_TIME = re.compile(rf"([0-9]{{1,18}}(?:\.[0-9]{{1,18}})?) ?({'|'.join(_SECONDS_OF)})")
# Limits of setting `workers`: the largest number, and the characters of the longest list.
_MOST_WORKERS, _LONGEST_LIST = 10**6, 100_000
Seconds = Annotated[float, Field(gt=0, le=LONGEST_S)]
Milliseconds = Annotated[float, Field(gt=0, le=1e3 * LONGEST_S)]
Shape = tuple[Annotated[int, Field(ge=1)], ...]
DATA = (
    "Training data: digits, text, masked-text, images:FOLDER, text:PATH, tokens:PATH.npy, "
    "libsvm:PATH or synthetic:SHAPE."
)


def read_shape(shape: Any) -> Any:
    """Parse a shape such as 3x224x224 to a tuple; return values other than text unchanged."""
    if not isinstance(shape, str):
        return shape
    try:
        return tuple(int(size) for size in shape.split("x"))
    except ValueError:
        raise ValueError(f"must be a shape such as 3x224x224 (got {shape!r})") from None


def read_list(values: Any) -> Any:
    """Parse a comma-separated list such as 1,4 to a tuple; a number becomes a tuple of one."""
    if isinstance(values, str):
        return tuple(part.strip() for part in values.split(","))
    return (values,) if isinstance(values, int | float) else values


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval, either of `steps` or of `seconds`; the other is None."""

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse an interval: 500 (steps), 60s, 5min or 1h; return None for "never".

        Raises ValueError for any other text, for an interval of 0, and for more than 1e9 s.
        """
        if text == "never":
            return None
        if _STEPS.fullmatch(text) and (steps := int(text)) > 0:
            return cls(steps=steps)
        if match := _TIME.fullmatch(text):
            seconds = float(match[1]) * _SECONDS_OF[match[2]]
            if 0 < seconds <= LONGEST_S:
                return cls(seconds=seconds)
        wanted = "a number of steps (500), a time (60s, 5min, 1h) or never"
        raise ValueError(f"must be {wanted} (got {text!r})")


def _read_interval(every: Any) -> Any:
    """Check an interval and return it as text; an integer is a number of steps."""
    if isinstance(every, int) and not isinstance(every, bool):
        every = str(every)
    if isinstance(every, str):
        Interval.parse(every)
    return every


Model = Annotated[
    str, Field(description="Built-in model, or package.module:factory of your own model.")
]
InputShape = Annotated[
    Shape | None,
    BeforeValidator(read_shape),
    Field(description="Shape of one sample of your own model, such as 3x224x224."),
]


class Record(BaseModel, frozen=True, extra="forbid"):
    """Base of settings and results: immutable; unknown fields are errors."""


class RunSettings(Record):
    """Settings common to training and rehearsing (timing exchanges with emulated layers)."""

    model: Model
    strategy: str = Field(
        "allreduce", description="Parallel strategy; auto selects the one predicted to be fastest."
    )
    options: dict[str, Any] = Field(
        {}, description="Option of the strategy, such as chunk=4; can be repeated."
    )
    workers: int | str = Field(
        2,
        description=(
            "Number of workers. Strategy hogbatch also accepts a list of devices: "
            "cpu:4,gpu:0 (4 CPU threads, GPU 0)."
        ),
    )
    batch_size: int = Field(64, ge=1, description="Samples per step, summed over all workers.")
    codec: str | None = Field(
        None,
        description=(
            "Codec that compresses exchanged values, such as dynamic8; in strategy wheel also one "
            "for each purpose: gradients=half,activations=dynamic8."
        ),
    )
    balance: Literal["auto"] | None = Field(
        None, description="Give each worker a share of the batch in proportion to its speed."
    )
    exchange_alone: bool = Field(
        False, description="Exchange gradients even with one worker, to measure the overhead."
    )
    profile_s: float = Field(
        4.0,
        ge=0,
        le=LONGEST_S,
        description="How long to profile the model before planning, in seconds.",
    )
    deadline_s: Seconds = Field(
        30.0, description="Seconds without an answer after which a worker counts as lost."
    )
    wait_s: Seconds = Field(600.0, description="Seconds to wait for workers to join.")
    listen: str | None = Field(
        None,
        description=(
            "Address on which the coordinating process (hub) listens, such as tcp://10.0.0.1:5555."
        ),
    )
    keys: Path | None = Field(
        None, description="Folder of encryption keys written by `paceline keys`."
    )
    run_name: str | None = Field(
        None,
        description="Name of the run, the same for the coordinating process (hub) and its workers.",
    )
    output: Path = Field(Path("runs"), description="Folder in which to create the run's folder.")

    @model_validator(mode="after")
    def _batch_fits_workers(self) -> Self:
        longest = len(str(_MOST_WORKERS)) if str(self.workers).isdecimal() else _LONGEST_LIST
        if len(str(self.workers)) > longest:
            raise ValueError(
                f"workers: must be at most {_MOST_WORKERS:,}, or a list of at most "
                f"{_LONGEST_LIST:,} characters (got {shown(self.workers)})"
            )
        if isinstance(self.workers, int) and self.workers < 1:
            raise ValueError(f"workers: must be at least 1 (got {self.workers})")
        if isinstance(self.workers, int) and self.batch_size < self.workers:
            least = f"{self.workers}, one sample for each worker"
            raise ValueError(f"batch_size: must be at least {least} (got {self.batch_size})")
        if self.exchange_alone and self.workers != 1:
            raise ValueError(f"exchange_alone: requires --workers 1 (got {self.workers})")
        if self.keys is not None and self.listen is None:
            raise ValueError("keys: requires --listen")
        return self


class TrainSettings(RunSettings):
    """The settings of `paceline train`.

    A setting of None stands for the default of a built-in model (`core.defaults`) or a recipe.
    """

    kind: Literal["train"] = "train"
    data: str | None = Field(None, description=DATA)
    epochs: int = Field(3, ge=1, description="Number of passes over the training data.")
    steps: int | None = Field(
        None, ge=1, lt=2**63, description="Number of steps to train, instead of epochs."
    )
    optimizer: str | None = Field(
        None,
        description=(
            "Optimizer of torch.optim or package.module:factory; by default adamw for "
            "gpt and vit, sgd otherwise."
        ),
    )
    optimizer_options: dict[str, Any] = Field(
        {}, description="Argument of the optimizer, such as weight_decay=0.1; can be repeated."
    )
    learning_rate: float | None = Field(
        None,
        gt=0,
        le=LARGEST_FLOAT32,
        description="Learning rate for the given batch size; by default the model's usual rate.",
    )
    momentum: float | None = Field(
        None, ge=0, lt=1, description="Momentum, if the optimizer has one; by default 0.9 for sgd."
    )
    schedule: str | None = Field(
        None,
        description="Learning rate schedule: constant, cosine, linear or package.module:factory.",
    )
    warmup_steps: int = Field(
        0,
        ge=0,
        lt=2**63,
        description="Steps in which the learning rate rises linearly to its full value.",
    )
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="Precision of forward and backward; bfloat16 uses torch.autocast."
    )
    accumulate: int = Field(
        1, ge=1, description="Number of micro-batches that each worker computes in a step."
    )
    clip_norm: float | None = Field(
        None,
        gt=0,
        le=LARGEST_FLOAT32,
        description="Maximum total norm of the gradients; larger gradients are scaled down.",
    )
    evaluate_every: int | None = Field(
        None,
        ge=1,
        description="Number of steps between evaluations; each epoch also ends with one.",
    )
    seed: int = Field(
        0,
        ge=0,
        lt=2**63,
        description="Random seed of initial weights, data split and sample order.",
    )
    keep_all: bool = Field(False, description="Use all workers, even if fewer would train faster.")
    checkpoint_every: Annotated[str, BeforeValidator(_read_interval)] = Field(
        "300s", description="Interval of checkpoints: 500 (steps), 60s, 5min, 1h or never."
    )
    keep_checkpoints: int = Field(2, ge=1, description="Number of checkpoints to keep.")
    resume: Path | None = Field(
        None, description="Folder of a run to continue, with its settings unless overridden."
    )
    max_restarts: int = Field(
        0, ge=0, description="Maximum number of restarts of a run that has lost a worker."
    )
    elastic: bool = Field(
        False, description="Let workers leave and join during training; requires strategy local."
    )
    lighthouse: str | None = Field(
        None, description="URL of torchft's lighthouse for elastic workers on several machines."
    )
    worker_ids: Annotated[
        tuple[Annotated[int, Field(ge=0)], ...] | None, BeforeValidator(read_list)
    ] = Field(None, description="Ids of the elastic workers to run on this machine, such as 2,3.")
    tensorboard: Path | None = Field(None, description="Folder for TensorBoard's event files.")

    @property
    def checkpoint_interval(self) -> Interval | None:
        """The interval between checkpoints; None for no checkpoints."""
        return Interval.parse(self.checkpoint_every)

    @model_validator(mode="after")
    def _steps_fit(self) -> Self:
        if isinstance(self.workers, int) and self.batch_size < self.workers * self.accumulate:
            most = f"{self.batch_size // self.workers}, the number of samples per worker"
            raise ValueError(f"accumulate: must be at most {most} (got {self.accumulate})")
        for name in ("lighthouse", "worker_ids"):
            if getattr(self, name) is not None and not self.elastic:
                raise ValueError(f"{name}: requires --elastic")
        if self.steps is not None and self.warmup_steps >= self.steps:
            problem = f"must be less than --steps, {self.steps} (got {self.warmup_steps})"
            raise ValueError(f"warmup_steps: {problem}")
        return self


class RehearseSettings(RunSettings):
    """The settings of `paceline rehearse`."""

    kind: Literal["rehearse"] = "rehearse"
    device: str | None = Field(
        None, description="Device to emulate: a name from machines/, or FILE.toml:NAME."
    )
    slowdown: Annotated[
        tuple[Annotated[float, Field(ge=1, le=LONGEST_S)], ...] | None, BeforeValidator(read_list)
    ] = Field(
        None, description="Slow all layers by a factor (4), or by one factor per worker (1,4)."
    )
    forward_ms: Milliseconds | None = Field(
        None, description="Duration of a forward pass on the emulated device, in milliseconds."
    )
    backward_ms: Milliseconds | None = Field(
        None, description="Duration of a backward pass on the emulated device, in milliseconds."
    )
    update_ms: Milliseconds | None = Field(
        None, description="Duration of an optimizer step on the emulated device, in milliseconds."
    )
    input_shape: InputShape = None
    steps: int = Field(20, ge=3, description="Number of steps to time.")
    profile_s: float = Field(
        2.0,
        ge=0,
        le=LONGEST_S,
        description="How long to profile the model before the rehearsal, in seconds.",
    )

    @model_validator(mode="after")
    def _fields_fit(self) -> Self:
        if self.device is None and self.slowdown is None:
            raise ValueError("device: must be given if --slowdown is not")
        if self.device is not None and self.slowdown is not None:
            raise ValueError("slowdown: cannot be combined with --device")
        for name in ("forward_ms", "backward_ms", "update_ms"):
            if getattr(self, name) is not None and self.device is None:
                raise ValueError(f"{name}: requires --device")
        if self.balance is not None and self.slowdown is None:
            raise ValueError("balance: requires --slowdown")
        if self.slowdown is not None and len(self.slowdown) not in (1, self.workers):
            problem = f"must be one number, or one for each of {self.workers} workers"
            raise ValueError(f"slowdown: {problem} (got {len(self.slowdown)} numbers)")
        return self

    def slowdown_of(self, rank: int) -> float:
        """Return the factor by which worker `rank` slows its layers; 1 without `slowdown`."""
        if self.slowdown is None:
            return 1.0
        return self.slowdown[rank if len(self.slowdown) > 1 else 0]
