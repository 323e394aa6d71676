"""Answer the requests of workers in the order of arrival, and test the model.

The hub executes requests at once, with three exceptions. A worker's BEGIN waits until training
begins. A request for parameters waits while another worker is too far behind
(`ParameterServer.may_begin`). A measurement of a link waits while another worker measures.

If a worker is lost, the hub drops its half-done step, and the other workers continue. The lost
worker may return.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch

from paceline.core.errors import InvalidInput, NonFinite, StepDiscarded, WorkerLost, printable
from paceline.core.settings import RehearseSettings, TrainSettings
from paceline.links.devices import device_of
from paceline.links.failpoints import reach
from paceline.measure.device_profile import DeviceProfile
from paceline.rpc.connecting import WorkerProcessSettings
from paceline.rpc.frames import Message
from paceline.rpc.keys import load_hub_keys
from paceline.rpc.limits import MOST_TEXT, Limits, RateLimitedLog
from paceline.rpc.server import Joined, Lost, RpcRequest, Server
from paceline.rpc.workers import WorkerPool, num_threads, refusal
from paceline.strategies.wheel.answers import Answers
from paceline.strategies.wheel.child_server import ChildServer
from paceline.strategies.wheel.config import RunSpec
from paceline.strategies.wheel.epochs import EpochLog
from paceline.strategies.wheel.job import TrainingJob
from paceline.strategies.wheel.measure import profile_head
from paceline.strategies.wheel.protocol import FREEING, UPDATES, Topic
from paceline.strategies.wheel.remote import SERVING, WORKING, ChildSettings
from paceline.strategies.wheel.server import ParameterServer
from paceline.strategies.wheel.worker_group import ProbeTurns, WorkerGroup

logger = logging.getLogger(__name__)
_LOOPBACK = "tcp://127.0.0.1:0"
_POLL_S = 0.2
_LEAVING_S = 5.0  # how long the hub waits for its worker processes to exit


class Hub:
    """Serves workers until all live workers have done their steps.

    Without `settings.listen`, the hub starts workers on `devices` of this machine, and an error of
    a worker ends the run. `stack` closes the hub's connections and processes. Raises InvalidInput
    if the hub cannot listen on the address.
    """

    def __init__(
        self,
        stack: ExitStack,
        settings: TrainSettings | RehearseSettings | ChildSettings,
        run_id: str,
        job: TrainingJob,
        server: ParameterServer,
        log: EpochLog,
        *,
        devices: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        spec, deadline_s = job.spec, settings.deadline_s
        largest, told = job.max_message_nbytes, spec.model_dump_json().encode()
        limits = Limits(run_id, spec.config.workers, largest, told)
        keys = None if settings.keys is None else load_hub_keys(settings.keys)
        self.rpc = Server(settings.listen or _LOOPBACK, limits, keys=keys, clock=clock)
        stack.callback(self.rpc.close)
        self._pool: WorkerPool | None = None
        if settings.listen is None:
            self._pool = _own_processes(spec, self.rpc.address, run_id, deadline_s, devices)
            stack.callback(self._pool.close)
        else:
            server.checks.compares_norms = True  # remote workers may send wrong values
            own = self.rpc.address, spec.config.workers
            logger.info("listening on %s; waiting for %d workers", *own)
        self.log = log
        log.status.before = self._status
        self.group = WorkerGroup(
            *(self.rpc, server.workers, self._pool),
            wait_s=settings.wait_s,
            deadline_s=deadline_s,
            clock=clock,
        )
        probes = ProbeTurns(largest, deadline_s, clock)
        self.answers = Answers(server, job, self.group, log, probes)
        self._job, self._server, self._clock, self._polled_s = job, server, clock, 0.0
        self._diverged: set[int] = set()  # workers whose last gradients were not finite
        self._refusals = RateLimitedLog(logger)
        self._on_first: Callable[[], None] = lambda: None
        self._between: Callable[[], None] = lambda: None

    def wait_for_workers(self) -> DeviceProfile | None:
        """Serve until all workers are ready to begin, or for `settings.wait_s`.

        Returns the measured speed of this hub's device; None if the run does not measure devices.
        Raises InvalidInput if a worker of this machine fails, and WorkerLost if no worker joins.
        """
        num_threads = torch.get_num_threads()

        def profile() -> DeviceProfile:
            torch.set_num_threads(num_threads)  # PyTorch has this setting per Python thread
            with device_of(self._job.device).use():
                return profile_head(self._job)

        found = list[Future[DeviceProfile]]()
        with ThreadPoolExecutor(1, "paceline-profile") as thread:
            if self._job.spec.profile_s:
                # Measure while the workers measure their devices, because hub and workers also
                # compute at the same time in training.
                self._on_first = lambda: found.append(thread.submit(profile))
            self._serve(lambda: self.group.is_ready)
            return found[0].result() if found else None

    def train(self, between: Callable[[], None] = lambda: None) -> None:
        """Let the workers begin, and serve them until all live workers have done their steps.

        Calls `between` a few times a second. Raises InvalidInput if a loss is not finite, or if a
        worker of this machine fails, and WorkerLost if no worker is left.
        """
        self._between = between
        self.log.begin()
        self.group.begin()
        self._serve(lambda: self.group.is_over)
        for recorder in self.answers.recorders:
            self.answers.trace.add(recorder.trace)

    def close(self) -> tuple[int, int]:
        """Disconnect, and end the hub's worker processes; return the bytes sent and received."""
        self.rpc.close()
        if self._pool is not None:
            self._pool.close(_LEAVING_S)
        return self.rpc.sent_nbytes, self.rpc.received_nbytes

    def _serve(self, is_over: Callable[[], bool]) -> None:
        try:
            while not is_over():
                event = self.rpc.receive(_POLL_S)
                if isinstance(event, RpcRequest):
                    self._execute(event)
                elif isinstance(event, Lost):
                    self._drop(event.worker, event.why)
                elif isinstance(event, Joined):
                    self._on_first()
                    self._on_first = lambda: None
                # A restarted parent discards summed gradients, so workers repeat their steps.
                if isinstance(self._server, ChildServer) and self._server.poll_parent():
                    self.group.restart()
                if not isinstance(event, RpcRequest) or event.message.topic in FREEING:
                    self._retry()
                self._poll()
                self._test()  # after `_poll`, which may drop the last worker
        except (InvalidInput, WorkerLost) as error:
            self.group.dismiss(str(error), self.answers.waiting)
            raise

    def _execute(self, request: RpcRequest) -> None:
        """Execute a request, and reply now or later; drop its worker if the request is invalid."""
        worker, message = request.worker, request.message
        self.group.deadline.requested(worker)
        try:
            reply = self.answers.execute(request)
            if message.topic in UPDATES:
                self._diverged.discard(worker)
        except StepDiscarded as error:
            logger.info("%s", error)
            reply = Message(Topic.AGAIN, message.step)
        except (NonFinite, InvalidInput, WorkerLost) as error:
            reply = self._refused(request, error)
        if reply is not None:
            self.group.reply(request, reply)
        if message.topic in UPDATES:
            reach("hub.updated", version=self._server.version)

    def _refused(
        self, request: RpcRequest, error: InvalidInput | NonFinite | WorkerLost
    ) -> Message:
        """Drop a worker that failed or sent an invalid request; return the refusal to send.

        The worker may join again. The run ends if the last values of all live workers were NaN or
        infinite. It also ends if this hub has started the worker: the others would fail, too.
        """
        reply, worker = refusal(str(error)), request.worker
        is_diverged = isinstance(error, NonFinite)
        if is_diverged:
            self._diverged.add(worker)
        all_have_diverged = is_diverged and self._server.workers.live <= self._diverged
        if self._pool is not None or all_have_diverged:
            self.rpc.reply(request, reply)
            raise InvalidInput("learning_rate", str(error)) if is_diverged else error
        why = printable(str(error), MOST_TEXT).removeprefix(f"worker {worker} ")
        if request.message.topic != Topic.FAILED:
            why = f"was refused: {why}"
        self._refusals.warning(f"worker {worker} {why}")
        self._drop(worker, why)
        return reply

    def _retry(self) -> None:
        """Execute waiting requests again."""
        waiting, self.answers.waiting = self.answers.waiting, []
        for request in waiting:
            self._execute(request)

    def _test(self) -> None:
        """Test the model if a test is due."""
        started_s = self._clock()
        if self.log.test(self._server.workers.completed):
            self._server.model.train()
            self.group.deadline.paused(self._clock() - started_s)
            self.log.status.begin()

    def _drop(self, worker: int, why: str) -> None:
        self.answers.forget(worker)
        self.group.drop(worker, why)

    def _poll(self) -> None:
        """Check the workers, retry requests, and show progress, a few times a second."""
        now_s = self._clock()
        if now_s - self._polled_s < _POLL_S:
            return
        self._polled_s = now_s
        for worker, why in self.group.poll():
            self._drop(worker, why)
        self._retry()
        self._refusals.flush()
        self._between()

    def _status(self) -> str:
        nbytes, server = self.rpc.sent_nbytes + self.rpc.received_nbytes, self._server
        return (
            f"update {server.version:,}, {len(server.workers.live)} workers, staleness "
            f"{server.updates.mean_staleness:.1f}, {nbytes / 1e6:,.0f} MB so far: "
        )


def _own_processes(
    spec: RunSpec, address: str, run_id: str, deadline_s: float, devices: Sequence[str]
) -> WorkerPool:
    """Start processes that connect to `address`: child hubs, or workers on `devices`."""
    connecting: dict[str, Any] = {"connect": address, "run_name": run_id, "deadline_s": deadline_s}
    if spec.tree is not None:
        children = range(spec.tree.child_hubs)
        return WorkerPool(SERVING, [ChildSettings(**connecting, number=one) for one in children])
    lanes = spec.config.workers_by_device
    own = [
        WorkerProcessSettings(
            **connecting, workers=tuple(workers), device=device, threads=num_threads(len(lanes))
        )
        for device, workers in zip(devices, lanes.values(), strict=True)
    ]
    return WorkerPool(WORKING, own)
