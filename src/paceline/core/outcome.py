"""The outcome of a run or a rehearsal, whatever strategy it had: what result.json is made of.

Every strategy fills in the fields that it knows; reports show the sections of the fields that are
filled in, and never ask which strategy it was.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from paceline.core.settings import Record
from paceline.core.timeline import Timeline
from paceline.core.wire_format import threshold_of

_SHARES = ("accuracy", "precision@1")
SHARE_FACTOR = 1.25  # of a declared share and the measured one: as much as bytes on the wire
Points = tuple[tuple[float, int], ...]  # seconds of training, and a number


@dataclass(frozen=True, slots=True)
class Epoch:
    """The mean training loss, and the loss and score on the test samples, of one epoch.

    `test_loss` is None without test samples, `score` where the recipe has none.
    """

    number: int
    train_loss: float
    test_loss: float | None
    score: float | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The loss and the score on the test samples after so many steps of the run."""

    num_steps: int
    test_loss: float | None
    score: float | None


@dataclass(frozen=True)
class Traffic:
    """Bytes that were sent for one purpose, as counted, and as planned by the formula.

    `travels` is False for what stays within one process.
    """

    purpose: str
    nbytes: float
    planned_nbytes: float
    travels: bool = True


@dataclass(frozen=True)
class SentShare:
    """The share of the values that a codec was declared to send, and that it has sent.

    `warning`: a line, if one is more than `SHARE_FACTOR` times the other.
    """

    codec: str
    declared: float
    measured: float
    warning: str | None

    @classmethod
    def of(cls, codec: str | None, measured: float | None) -> "SentShare | None":
        """Return the check of a codec by its name; None if either share is not known."""
        threshold = None if codec is None else threshold_of(codec)
        if codec is None or measured is None or threshold is None or threshold.share is None:
            return None
        declared, warning = threshold.share, None
        if not declared <= SHARE_FACTOR * measured or measured > SHARE_FACTOR * declared:
            warning = (
                f"{codec} declares that it sends {declared:.3g} of the values and has sent "
                f"{measured:.3g}, which is over {SHARE_FACTOR:g} times off: plans take other bytes"
            )
        return cls(codec, declared, measured, warning)


@dataclass(frozen=True)
class SplitHead:
    """A head whose layers are shared by the workers: its layers and the bytes of its state.

    The state is parameters, gradients and what the optimizer keeps of them: of the whole head, and
    of each rank's part.
    """

    layers: tuple[str, ...]
    state_nbytes: int
    own_state_nbytes: Annotated[tuple[int, ...], Field(min_length=1)]

    @property
    def saved_nbytes(self) -> int:
        """The bytes that the rank with the largest part has less than a whole head."""
        return self.state_nbytes - max(self.own_state_nbytes)


@dataclass(frozen=True)
class Updates:
    """Updates of a shared model by asynchronous workers.

    `by_worker`: how many each made. `staleness`: for each worker, how many of its batches missed so
    many updates of others. `gaps`: by how many updates the first worker was ahead of the last.
    """

    count: int
    by_worker: Mapping[str, int]
    staleness: Mapping[str, Mapping[int, int]]
    mean_staleness: float
    gaps: Points = ()


@dataclass(frozen=True)
class UnevenWorker:
    """A worker of an uneven run: what was asked for, what it reached alone, and its share.

    `tried_samples_per_s`: its speed in the trial before the training, None if there was none.
    `updates_share`: its part of all updates; `predicted_share`: the plan's.
    """

    name: str
    spec: str
    tried_samples_per_s: float | None
    samples: int
    updates_share: float
    predicted_share: float | None
    batch_sizes: Points = ()


@dataclass(frozen=True)
class ChunkTrial:
    """A chunk size that a search has tried: its layers, and seconds a step."""

    chunk: int
    predicted_s: float
    rehearsed_s: float


def is_share(score: str) -> bool:
    """Return True if the score of that name is a share of the samples."""
    return score in _SHARES


class RunMetrics(Record):
    """What is known of a run when it is over, and saved in result.json as it is.

    `samples_per_s` is that of the untraced steps, `tokens_per_s` where samples are tokens;
    `evaluations` are those within epochs and after them, if any were asked for; `trained_s`:
    seconds of training without tests. `decisions`: why a configuration was chosen on the way.
    `faults`: where the traced steps depart from the plan, None if none were traced. `lost`: workers
    that ended before the run, and why. `peak_memory_bytes` by worker; `shares`: the samples of each
    worker in a batch, where batches are balanced. `wire_nbytes`: all bytes sent and received with
    headers. `sent_share`: the check of a codec whose name declares it. `utilisation`: by device,
    the share of the time in which it computed.
    """

    samples_per_s: float
    trained_s: float | None = None
    tokens_per_s: float | None = None
    epochs: tuple[Epoch, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    score: str = "accuracy"
    predicted_step_s: float | None = None
    predicted_samples_per_s: float | None = None
    decisions: tuple[str, ...] = ()
    trials: tuple[ChunkTrial, ...] = ()
    faults: tuple[str, ...] | None = ()
    lost: tuple[str, ...] = ()
    peak_memory_bytes: tuple[int, ...] = ()
    shares: tuple[int, ...] | None = None
    traffic: tuple[Traffic, ...] = ()
    wire_nbytes: tuple[int, int] | None = None
    sent_share: SentShare | None = None
    head: SplitHead | None = None
    updates: Updates | None = None
    workers: tuple[UnevenWorker, ...] = ()
    utilisation: dict[str, float] = Field({})
    predicted_utilisation: dict[str, float] = Field({})


class Outcome(RunMetrics, arbitrary_types_allowed=True):
    """The outcome of a run: its metrics, and what its result is computed from.

    `timeline`: the traced steps of all workers; `predicted`: the same steps as planned, if they can
    be. `step_seconds`: durations of the untraced steps. `config`: the strategy's configuration
    that was used in the end. `device`: what the workers computed on, where this is not the device
    of the session's group.
    """

    timeline: Timeline
    predicted: Timeline | None = None
    config: Any = None
    step_seconds: tuple[float, ...] = ()
    device: str | None = None


class Finding(Record):
    """What a result shows: a metric beyond its threshold, in a sentence that says what to do.

    `code` names the rule that found it, whatever the sentence says.
    """

    code: str
    metric: str
    value: float
    threshold: float
    message: str
