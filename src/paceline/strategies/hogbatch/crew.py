"""All workers of a run: each started on cores of its own, heard in one loop, and ended."""

import os
import selectors
import time
from collections.abc import Callable, Sequence

from paceline.core.errors import InvalidInput
from paceline.core.timeline import Span
from paceline.links.cores import physical_cores
from paceline.links.shared_tensors import SharedTensors
from paceline.strategies.hogbatch import hand
from paceline.strategies.hogbatch.hand import Hand
from paceline.strategies.hogbatch.messages import ExecuteWork, Order
from paceline.strategies.hogbatch.worker import Learning
from paceline.strategies.hogbatch.workers import MOST_WORKERS, WorkerSpec

_START_S = 120.0  # to import torch on a machine that is busy
_LOOK_EVERY_S = 0.5
_MOST_THREADS_PER_CORE = 4


class Crew:
    """The processes that train one model in shared memory on shared samples.

    None answers later than `deadline_s` after it was told something, or is given up.
    """

    def __init__(
        self, learning: Learning, model: SharedTensors, data: SharedTensors, deadline_s: float
    ) -> None:
        self._learning, self._model, self._data = learning, model, data
        self._deadline_s = deadline_s
        self._selector = selectors.DefaultSelector()
        self._cores = _Cores()
        self._look_s = 0.0
        self.hands: list[Hand] = []

    @property
    def living(self) -> list[Hand]:
        """Those that are not gone."""
        return [one for one in self.hands if not one.is_gone]

    def join(self, spec: WorkerSpec) -> Hand:
        """Start a worker."""
        number = len(self.hands)
        if number >= MOST_WORKERS:
            raise InvalidInput(f"workers: at most {MOST_WORKERS} can join a run")
        cores = self._cores.take(spec)
        joined = hand.start(number, spec, cores, self._learning, self._model, self._data)
        self.hands.append(joined)
        self._selector.register(joined.wire, selectors.EVENT_READ, joined)
        return joined

    def serve(
        self,
        is_done: Callable[[], bool],
        hear: Callable[[Hand, bytes], None],
        lose: Callable[[Hand, str], None],
    ) -> None:
        """Have messages heard until it is done, and workers lost with the reason."""
        select = self._selector.select
        while not is_done():
            for key, _ in select(_LOOK_EVERY_S):
                one: Hand = key.data
                if one.is_gone:
                    continue
                packet = one.hear()
                if packet:
                    hear(one, packet)
                else:
                    lose(one, self._end(one))
            now_s = time.monotonic()
            if now_s >= self._look_s:
                self._look_s = now_s + _LOOK_EVERY_S
                self._give_up_silent(now_s, lose)

    def _give_up_silent(self, now_s: float, lose: Callable[[Hand, str], None]) -> None:
        for one in self.living:
            allowed_s = self._deadline_s if one.is_ready else _START_S
            if one.is_awaited and now_s - one.silent_since_s > allowed_s:
                self._end(one)
                lose(one, f"did not answer within {allowed_s:g} s")

    def _end(self, one: Hand) -> str:
        self._selector.unregister(one.wire)
        return one.end()

    def stop(self) -> tuple[list[Span], dict[str, int]]:
        """Stop all; return what they have traced, and the peak memory of each in bytes."""
        spans: list[Span] = []
        peaks: dict[str, int] = {}
        stopped = self.living
        for one in stopped:
            one.tell(ExecuteWork(Order.STOP))
        for one in stopped:
            self._selector.unregister(one.wire)
            peaks[one.name], own = one.leave()
            spans += own
        return spans, peaks

    def close(self) -> None:
        """End those that are left."""
        for one in self.hands:
            if not one.is_gone:
                one.end()
            one.forget()
        self._selector.close()


def check_threads(specs: Sequence[WorkerSpec]) -> None:
    """Raise InvalidInput if there are too many threads for the cores of this machine."""
    cores = len(os.sched_getaffinity(0))
    threads = sum(spec.threads for spec in specs if spec.kind == "cpu")
    if threads > _MOST_THREADS_PER_CORE * cores:
        raise InvalidInput(
            f"workers: {threads} threads do not fit on {cores} cores; "
            f"at most {_MOST_THREADS_PER_CORE} can share one"
        )


class _Cores:
    """The cores of this machine, each given to one thread as long as there are enough."""

    def __init__(self) -> None:
        self._left = physical_cores(os.sched_getaffinity(0))

    def take(self, spec: WorkerSpec) -> tuple[int, ...]:
        """Return the processors of a worker; none if too few are left: then it may be anywhere."""
        if spec.kind == "gpu" or spec.threads > len(self._left):
            return ()
        taken, self._left = self._left[: spec.threads], self._left[spec.threads :]
        return tuple(cpu for core in taken for cpu in core)
