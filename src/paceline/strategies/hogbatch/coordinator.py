"""The coordinator of section V: whoever asks for work gets the next samples of the epoch.

    worker       ScheduleWork: what it has done ----> coordinator
    coordinator  ExecuteWork: which samples, at what learning rate ----> the same worker

One loop over the workers' sockets. One whose batches are short has the next ones beforehand, and
says of several at once that they are done. A worker that ends, or does not answer in time, gives
its samples back, and the others go on; one may join at any time.
What is done is counted when its worker says so, or has left the number of the batch in the shared
memory before it died.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import Self

from torch import Tensor

from paceline.core.errors import InvalidInput, WorkerLost
from paceline.core.timeline import Span
from paceline.links.shared_tensors import SharedTensors
from paceline.strategies.hogbatch.ahead import wants_more
from paceline.strategies.hogbatch.config import Hogbatch
from paceline.strategies.hogbatch.crew import Crew
from paceline.strategies.hogbatch.hand import Hand
from paceline.strategies.hogbatch.history import Batch, History
from paceline.strategies.hogbatch.messages import (
    READY,
    TRIED,
    ExecuteWork,
    Failure,
    Order,
    ScheduleWork,
    read,
)
from paceline.strategies.hogbatch.policy import Counts, Policy, policy_of, rate_factor, updates_of
from paceline.strategies.hogbatch.pool import Pool
from paceline.strategies.hogbatch.worker import COMMITS, ORDER, Learning
from paceline.strategies.hogbatch.workers import WorkerSpec

_NS = 1e-9
_NUM_TIMES = len(ScheduleWork(READY).times)


@dataclass(frozen=True)
class Conduct:
    """How a run goes, beyond what its policy says.

    `batch_size` is the one that the learning rate was chosen for. A worker tries batches of each of
    the `trial_sizes` for about `trial_s` before it gets work; the last tells its speed. In epoch
    `traced_epoch` the first `most_traced` batches of each worker are traced. `advance` is told of
    samples that were trained on, `say` of workers that are lost.
    """

    batch_size: int
    trial_sizes: Callable[[WorkerSpec], Sequence[int]]
    deadline_s: float = 30.0
    trial_s: float = 0.5
    traced_epoch: int = -1
    most_traced: int = 50
    advance: Callable[[int], None] = lambda size: None
    say: Callable[[str], None] = lambda text: None


class Coordinator:
    """Workers that train one model in shared memory on shared samples.

    Use it as a context: at its end no worker is left.
    """

    def __init__(
        self,
        config: Hogbatch,
        conduct: Conduct,
        learning: Learning,
        model: SharedTensors,
        data: SharedTensors,
    ) -> None:
        self._config, self._conduct, self._learning = config, conduct, learning
        self._order, self._commits = data.tensors[ORDER], data.tensors[COMMITS]
        self._commits.fill_(-1)
        self._crew = Crew(learning, model, data, conduct.deadline_s)
        self._active: list[Hand] = []  # those that the policy knows, in its order
        self._policy: Policy | None = None
        self._pool = Pool(0)
        self._epoch = 0
        self._num_batches = self._num_updates = 0
        self._loss_sum, self._num_told = 0.0, 0  # of this epoch; samples whose loss is known
        self._offset_ns = self._trained_ns = 0  # of the clock of training
        self._has_begun = False
        self.history = History()
        self.lost: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._crew.close()

    @property
    def hands(self) -> Sequence[Hand]:
        """All workers there ever were, by their numbers."""
        return self._crew.hands

    @property
    def trained_s(self) -> float:
        """Seconds of training so far, without what lies between epochs."""
        return self._trained_ns * _NS

    @property
    def largest_batch(self) -> int:
        """The size that no batch exceeds, of all workers that are at work."""
        assert self._policy is not None
        return max(self._policy.largest_batch(i) for i in range(len(self._active)))

    def join(self, spec: WorkerSpec) -> int:
        """Start a worker and return its number. It gets work as soon as it has tried its speed."""
        return self._crew.join(spec).number

    def start(self, specs: Sequence[WorkerSpec]) -> None:
        """Start the first workers, and have all try their speed at once, as they will work.

        Raises WorkerLost if none comes, and what a worker has found wrong.
        """
        for spec in specs:
            self.join(spec)
        self._serve(lambda: all(hand.is_ready for hand in self._crew.living))
        for hand in self._crew.living:
            self._try(hand)
        self._has_begun = True
        self._serve(lambda: all(hand.speed is not None for hand in self._crew.living))

    def train_epoch(self, epoch: int, order: Tensor) -> tuple[float, float]:
        """Train on all samples once, in this order; return the mean loss and the seconds it took.

        Raises InvalidInput for a loss that is not finite, WorkerLost if no worker is left.
        """
        self._order.copy_(order)
        self._epoch, self._pool = epoch, Pool(len(order))
        self._loss_sum, self._num_told = 0.0, 0
        self._offset_ns = time.monotonic_ns() - self._trained_ns
        self._hand_out_to_idle()
        self._serve(lambda: self._pool.is_done)
        before_ns, self._trained_ns = self._trained_ns, time.monotonic_ns() - self._offset_ns
        return self._loss_sum / max(1, self._num_told), (self._trained_ns - before_ns) * _NS

    def finish(self) -> tuple[list[Span], dict[str, int]]:
        """Stop all workers; return what they have traced, and their peak memory in bytes."""
        return self._crew.stop()

    def _serve(self, is_done: Callable[[], bool]) -> None:
        self._crew.serve(is_done, self._hear, self._lose)

    def _hear(self, hand: Hand, packet: bytes) -> None:
        messages = read(packet)
        if isinstance(messages, Failure):
            reason = f"{hand.title} failed: {messages.reason}"
            raise InvalidInput(reason) if messages.by_input else WorkerLost(reason)
        if messages[0].batch == READY:
            hand.is_ready = True
            if self._has_begun:
                self._try(hand)
        elif messages[0].batch == TRIED:
            self._note_trial(hand, messages[0])
        else:
            self._note_batches(hand, messages)

    def _try(self, hand: Hand) -> None:
        if not hand.tried:
            hand.to_try = list(self._conduct.trial_sizes(hand.spec))
        hand.tell(ExecuteWork(Order.TRY, size=hand.to_try[0], rate=self._conduct.trial_s))

    def _note_trial(self, hand: Hand, message: ScheduleWork) -> None:
        hand.tried[hand.to_try.pop(0)] = message.ended_ns * _NS
        if hand.to_try:
            self._try(hand)
            return
        size, seconds = list(hand.tried.items())[-1]
        hand.speed = size / seconds
        # One that joins late does not have to catch up with what was done before it came.
        hand.updates = min((other.updates for other in self._active), default=0.0)
        self._choose_policy()
        self._hand_out(hand)

    def _choose_policy(self) -> None:
        """Have the policy know the workers that are there now."""
        self._active = [hand for hand in self._crew.living if hand.speed is not None]
        if self._active:
            workers = [hand.as_worker for hand in self._active]
            self._policy = policy_of(self._config, workers, self._conduct.batch_size)

    def _note_batches(self, hand: Hand, messages: Sequence[ScheduleWork]) -> None:
        done = [(self._counted(hand, message), message) for message in messages]
        offset_ns = self._offset_ns
        self._hand_out(hand)  # first, for the worker waits
        for work, message in done:
            times = [moment - offset_ns for moment in message.times]
            self._note(hand, work, message.updates, message.loss, times)

    def _counted(self, hand: Hand, message: ScheduleWork) -> ExecuteWork:
        """Count what was done, and return what was asked."""
        work = hand.work
        if work is None or work.batch != message.batch:
            raise WorkerLost(f"{hand.title} speaks of a batch that it was not given")
        if not isfinite(message.loss):
            raise InvalidInput(
                f"learning_rate: the loss of {hand.title} became {message.loss} in epoch "
                f"{self._epoch + 1}, on a batch of {message.size}; choose a smaller one than "
                f"{self._learning.learning_rate:g}"
            )
        hand.took(work.size, (message.ended_ns - message.started_ns) * _NS)
        self._count(hand, work, message.updates)
        self._loss_sum += message.loss
        self._num_told += work.size
        return work

    def _note(
        self, hand: Hand, work: ExecuteWork, updates: int, loss: float, times: Sequence[int]
    ) -> None:
        self.history.add(
            Batch(hand.number, self._epoch, work.first, work.size, updates, loss, *times)
        )
        self._conduct.advance(work.size)

    def _count(self, hand: Hand, work: ExecuteWork, updates: int) -> None:
        hand.has_done()
        hand.updates += updates_of(hand.as_worker, work.size, self._config.beta)
        hand.missed = self._num_updates - hand.seen
        self._num_updates += updates
        hand.seen = self._num_updates  # when it began what it has in hand
        self._pool.use(range(work.first, work.first + work.size))

    def _hand_out(self, hand: Hand) -> None:
        """Give a worker its next samples, if there are any; if they are few, more beforehand."""
        speeds = sum(one.speed or 0.0 for one in self._active)
        decays = self._config.staleness_decay > 0  # with what its latest batch has missed
        while not self._pool.is_empty:
            left_s = 0.0 if decays else len(self._pool) / speeds
            if not wants_more([hand.seconds(work.size) for work in hand.given], left_s):
                return
            self._give(hand)

    def _give(self, hand: Hand) -> None:
        active = self._active
        expected = [self._expected(one, all_done=one is hand) for one in active]
        counts = Counts(expected, [one.size for one in active])
        assert self._policy is not None
        hand.size = self._policy.next_batch(active.index(hand), counts)
        taken = self._pool.take(hand.size)
        assert taken is not None
        decay = self._config.staleness_decay
        rate = rate_factor(len(taken), self._conduct.batch_size, hand.missed, decay)
        conduct = self._conduct
        traced = self._epoch == conduct.traced_epoch and hand.num_traced < conduct.most_traced
        hand.num_traced += traced
        if not hand.given:
            hand.seen = self._num_updates
        number = self._num_batches
        self._num_batches += 1
        hand.give(ExecuteWork(Order.TRAIN, number, taken.start, len(taken), rate, traced))

    def _expected(self, hand: Hand, all_done: bool) -> float:
        """Return its updates when all is done that it has been given, or all but the last."""
        counted = list(hand.given) if all_done else list(hand.given)[:-1]
        return hand.updates + sum(
            updates_of(hand.as_worker, work.size, self._config.beta) for work in counted
        )

    def _hand_out_to_idle(self) -> None:
        for hand in self._active:
            if not hand.given:
                self._hand_out(hand)

    def _lose(self, hand: Hand, why: str) -> None:
        """Go on without a worker: what it had was done, or goes to the others."""
        reason = f"{hand.title} {why}"
        self.lost.append(reason)
        self._choose_policy()
        for work in tuple(hand.given):
            self._settle(hand, work)
        if not self._crew.living:
            raise WorkerLost(f"{reason}: no worker is left")
        self._conduct.say(f"{reason}: the others go on")
        self._hand_out_to_idle()

    def _settle(self, hand: Hand, work: ExecuteWork) -> None:
        """Count what a lost worker had been given, or take it back."""
        taken = range(work.first, work.first + work.size)
        if int(self._commits[hand.number]) < work.batch:
            hand.has_done()
            self._pool.give_back(taken)
            return
        updates = min(hand.spec.threads, work.size)
        self._count(hand, work, updates)
        now_ns = time.monotonic_ns() - self._offset_ns
        self._note(hand, work, updates, nan, [now_ns] * _NUM_TIMES)
