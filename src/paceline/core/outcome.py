"""The outcome of a run or rehearsal with any strategy, as saved in result.json.

Each strategy sets the fields that it knows; reports show sections for the fields that are set, and
do not depend on the strategy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from paceline.core.settings import Record
from paceline.core.timeline import Timeline
from paceline.core.wire_format import threshold_of

SHARE_FACTOR = 1.25  # warn if a codec sends more values than declared, or fewer, by this factor
Points = tuple[tuple[float, int], ...]  # each point: seconds of training, and a value


@dataclass(frozen=True, slots=True)
class Epoch:
    """An epoch's mean training loss, test loss and test score.

    `test_loss` is None without test samples; `score` is None if the recipe defines no score.
    """

    number: int
    train_loss: float
    test_loss: float | None
    score: float | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Test loss and score after a number of steps."""

    num_steps: int
    test_loss: float | None
    score: float | None


@dataclass(frozen=True)
class Traffic:
    """Bytes sent for one purpose, such as activations: as counted and as planned.

    `travels`: False if sender and receiver are the same process, so that nothing is sent.
    """

    purpose: str
    nbytes: float
    planned_nbytes: float
    travels: bool = True


@dataclass(frozen=True)
class SentShare:
    """The share of values that a codec declares to send, and the share that it sent.

    `warning`: text for the user if these shares differ by more than a factor of `SHARE_FACTOR`.
    """

    codec: str
    declared: float
    measured: float
    warning: str | None

    @classmethod
    def of(cls, codec: str | None, measured: float | None) -> "SentShare | None":
        """Compare a codec's declared share with `measured`; None if either is unknown."""
        threshold = None if codec is None else threshold_of(codec)
        if codec is None or measured is None or threshold is None or threshold.share is None:
            return None
        declared, warning = threshold.share, None
        if not declared <= SHARE_FACTOR * measured or measured > SHARE_FACTOR * declared:
            warning = (
                f"{codec} sent {measured:.3g} of the values, not {declared:.3g} as declared; plans "
                "assume the declared share"
            )
        return cls(codec, declared, measured, warning)


@dataclass(frozen=True)
class SplitHead:
    """A model's last layers (head), divided among ranks, and the bytes of their state.

    The state comprises parameters, gradients and optimizer state. `state_nbytes`: bytes of the
    whole head's state. `own_state_nbytes`: for each rank, bytes of the state of its part.
    """

    layers: tuple[str, ...]
    state_nbytes: int
    own_state_nbytes: Annotated[tuple[int, ...], Field(min_length=1)]

    @property
    def saved_nbytes(self) -> int:
        """Bytes of state that splitting saves on the rank with the largest part."""
        return self.state_nbytes - max(self.own_state_nbytes)


@dataclass(frozen=True)
class Updates:
    """Updates of a shared model by asynchronous workers.

    `by_worker`: number of updates of each worker. `staleness`: for each worker, how many of its
    batches were computed while other workers made 0, 1, ... updates. `gaps`: over time,
    the difference between the largest and the smallest number of updates per worker.
    """

    count: int
    by_worker: Mapping[str, int]
    staleness: Mapping[str, Mapping[int, int]]
    mean_staleness: float
    gaps: Points = ()


@dataclass(frozen=True)
class UnevenWorker:
    """A worker of a run on unequal devices: its device, its speed, and its share of the updates.

    `spec`: the worker's entry in setting `workers`, such as "gpu:0". `tried_samples_per_s`: speed
    in the trial before training; None without a trial. `updates_share`: the worker's share of all
    updates. `predicted_share`: prediction of `updates_share`; None without a prediction.
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
    """A tried chunk size (layers per exchange): seconds per step, predicted and timed."""

    chunk: int
    predicted_s: float
    rehearsed_s: float


def is_share(score: str) -> bool:
    """Return whether the score named `score` is a share of samples, to be shown in percent."""
    return score == "accuracy"


class RunMetrics(Record):
    """Metrics of a finished run, saved in result.json.

    `samples_per_s`: throughput of untraced steps (a trace records each task).
    `tokens_per_s`: throughput in tokens, if samples consist of tokens. `evaluations`: all tests, if
    `evaluate_every` is set. `trained_s`: seconds of training without tests. `decisions`: changes of
    configuration during the run, with reasons. `faults`: differences between traced steps and their
    plan; None without traced steps. `lost`: workers that ended early, with reasons.
    `peak_memory_bytes`: peak bytes of each worker. `shares`: number of samples of each worker in a
    balanced batch. `wire_nbytes`: bytes sent and bytes received, including headers. `sent_share`:
    share of the values that the codec sends, declared and measured. `utilisation`: for each device,
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
    """The outcome of a run: metrics, timelines and configuration.

    `timeline`: traced steps of all workers. `predicted`: the same steps as planned; None without a
    plan. `step_seconds`: durations of steps that were not traced. `config`: the strategy's
    configuration at the end. `device`: device of the workers; None: that of the saving process.
    """

    timeline: Timeline
    predicted: Timeline | None = None
    config: Any = None
    step_seconds: tuple[float, ...] = ()
    device: str | None = None


class Finding(Record):
    """A metric above its threshold, with a message that recommends an action.

    `code` identifies the rule.
    """

    code: str
    metric: str
    value: float
    threshold: float
    message: str
