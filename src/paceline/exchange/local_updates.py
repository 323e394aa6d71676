"""Local SGD: train workers independently in a user's loop, and average parameters at intervals.

loop      step 1 ... step H           | step H+1 ... step H+delay | ...
          optimizer.step -> hook      send                        load
thread                                [headers, mean, outer step ]

An inner step is a training step of one worker; an outer step applies the mean change of all
workers. Module `running_exchange` decides when to exchange, `core.rounds` chooses the outer step's
learning rate and momentum, and `outer` computes the mean and takes the outer step.
"""

import atexit
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import default_pg_timeout
from torch.optim import Optimizer

from paceline.codecs.codec import Codec
from paceline.core.errors import InvalidInput
from paceline.core.reading import validated
from paceline.core.rounds import Rounds
from paceline.exchange.elastic import ElasticWorkers
from paceline.exchange.inner_steps import InnerState, InnerSteps, StepLock
from paceline.exchange.outer import (
    Averaged,
    Averaging,
    Contribution,
    OptimizerFactory,
    OuterModel,
    add_change,
    flatten,
    fragments_of,
    load_vector,
)
from paceline.exchange.readiness import weakly
from paceline.exchange.replica import Statistics
from paceline.exchange.running_exchange import NO_EXCHANGE, ExchangeLog, RoundPlace, RunningExchange
from paceline.exchange.workers import FixedWorkers, Settings, meet, settings_of
from paceline.links.call_thread import CallThread
from paceline.links.group import Group

if TYPE_CHECKING:
    from torchft import Manager


class LocalUpdates:
    """Trains workers independently, and averages their progress every `sync_every` steps.

        with paceline.LocalUpdates(model, optimizer, sync_every=50, codec="dynamic4"):
            for batch in loader:
                ...  # loss.backward(); optimizer.step(); optimizer.zero_grad()

    Start one process per worker with torchrun; the loop needs no other change. An inner step is one
    step of each of this worker's optimizers. At the start, all workers load worker 0's parameters.
    Only trainable parameters are averaged. The averaged parameters are called the outer model, of
    which every worker has a copy. After an exchange, all copies are bit-identical: workers compare
    hashes, and a worker whose copy differs loads worker 0's copy. A worker whose parameters are NaN
    or infinite is excluded from the average; it loads the outer model and resets its optimizers.
    A warning names the workers that were excluded, and the workers whose copies differed.

    `sync_every` and `delay` may differ between workers, so that a faster worker takes more steps in
    the same time. `weight`: weight of an inner step in the mean, such as its number of samples; the
    attribute `weight` may be set before each step. `fragments`, `delay`, `mixing`, `codec`,
    `outer_learning_rate`, `outer_momentum`: see `paceline.core.rounds.Rounds`. `outer`: "auto",
    "average", "nesterov", or a function that creates a torch optimizer for a list of tensors.
    `num_steps`: expected number of inner steps, used by `outer="auto"`. `deadline_s`: longest wait
    for another worker, before WorkerLost is raised. Default: the process group's timeout.

    `process_group` or a one-dimensional `device_mesh`: group of the workers. Default: all ranks. If
    FSDP2 or DDP is used within a host, pass the group of processes with the same local rank. If a
    DDP wraps the model across the workers (as a Trainer does), it exchanges no gradients until
    `close`.

    `manager`: a torchft.Manager instead of a process group. With it, workers may be lost, return
    and join. A failed exchange is repeated with the remaining workers for at most `deadline_s`. A
    new or returning worker loads the model, optimizer state, buffers and `num_steps` of another
    worker. Create the manager with `use_async_quorum=False` and a torchft.ProcessGroupGloo. Call
    its `shutdown` after training, because the other workers wait for this worker until then.

    `close`, or the end of the `with` block, averages the changes since the last exchange. It then
    takes part in exchanges until all workers finish. Raises InvalidInput for unsupported arguments.
    """

    _running: RunningExchange | None = None

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        sync_every: int = 100,
        *,
        fragments: int = 1,
        delay: int = 0,
        mixing: float | None = None,
        codec: str | Codec | None = None,
        outer: str | OptimizerFactory = "auto",
        outer_learning_rate: float | None = None,
        outer_momentum: float | None = None,
        num_steps: int | None = None,
        weight: float = 1.0,
        process_group: dist.ProcessGroup | None = None,
        device_mesh: DeviceMesh | None = None,
        deadline_s: float | None = None,
        manager: "Manager | None" = None,
    ) -> None:
        given = {
            "sync_every": sync_every,
            "fragments": fragments,
            "delay": delay,
            "mixing": mixing,
            "codec": codec if isinstance(codec, str) else None,
            "outer": outer if isinstance(outer, str) else "nesterov",
            "outer_learning_rate": outer_learning_rate,
            "outer_momentum": outer_momentum,
        }
        self._rounds = validated(Rounds, given)
        self._model, self.weight, self._steps = model, weight, InnerSteps(model, optimizer)
        self._fragments = fragments_of(model, fragments)
        self._place, self.log = RoundPlace(self._rounds), ExchangeLog()
        # outer="auto" depends on these values, so `_begin` replaces them by worker 0's
        self._chosen_by = sync_every, None if num_steps is None else num_steps / sync_every
        settings = settings_of(self._rounds, codec, outer, self._fragments)
        group, self._suspended = meet(
            model, settings, process_group, device_mesh, deadline_s, manager
        )
        self._outer = OuterModel(self._fragments, None if isinstance(outer, str) else outer)
        self._averaging = Averaging(self._outer, codec)
        self._begin(group, settings, deadline_s, manager)

    def _begin(
        self,
        group: Group | None,
        settings: Settings,
        deadline_s: float | None,
        manager: "Manager | None",
    ) -> None:
        """Connect to the workers, hook the optimizers and, with `manager`, exchange once."""
        self._workers: FixedWorkers | ElasticWorkers
        if group is None:
            self._workers = self._elastic(manager, settings, deadline_s)
        else:
            self._chosen_by = tuple(group.gather(self._chosen_by)[0])
            self._workers = FixedWorkers(group, self._averaging)
        for one in self._suspended:
            # With `require_forward_param_sync`, DDP would broadcast buffers to all workers.
            one.require_backward_grad_sync = one.require_forward_param_sync = False
        self._is_open, self._thread = True, CallThread("paceline-local-updates")
        self._thread.end_with(self)
        self._steps.watch(self._after_step, self._workers.lock)
        # end the thread at exit: a daemon thread killed within torch code would abort the process
        self._at_exit = weakly(self.abort)
        atexit.register(self._at_exit)
        if group is None:
            # this exchange changes -1 to 0 or, if it loads a peer's state, to the peer's number
            self._place.num_exchanges = -1
            self._exchange_now(is_closing=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Call `close`, or `abort` if the `with` block raised an exception."""
        if kind is None:
            self.close()
        else:
            self.abort()

    @property
    def num_steps(self) -> int:
        """Number of training steps (inner steps) that this worker has taken."""
        return self._steps.count

    @property
    def num_exchanges(self) -> int:
        """Number of exchanges so far; each fragment's exchange counts as one."""
        return self._place.num_exchanges

    def close(self) -> None:
        """Average the last changes, exchange until all workers have finished, and remove the hooks.

        Raises InvalidInput if parameters changed without a step of the given optimizers.
        """
        if not self._is_open:
            return
        try:
            if not self._steps.count and not all(
                map(torch.equal, self.own_parameters(), self._outer.values)
            ):
                hint = "pass LocalUpdates the optimizer that changes the parameters"
                raise InvalidInput("optimizer", "has taken no step", hint=hint)
            self._load()
            while not self._exchange_now().all_closing:
                pass
            for _ in range(self._workers.num_final_exchanges):
                self._exchange_now()
        finally:
            self.abort()

    def statistics(self) -> Statistics:
        """Return this worker's step count, bytes sent, and exposed and hidden exchange time."""
        nbytes, share = self._averaging.nbytes, self._averaging.codecs.sent_share
        times = self.log.exposed_s, max(0.0, self.log.took_s - self.log.exposed_s)
        return Statistics("local", self._steps.count, nbytes, nbytes, *times, sent_share=share)

    def own_parameters(self) -> list[Tensor]:
        """Return a copy of this worker's own parameters, as one vector for each fragment."""
        return [flatten(one, self._outer.dtype) for one in self._fragments]

    def load_own_parameters(self, vectors: Sequence[Tensor]) -> None:
        """Load vectors from `own_parameters` into the model."""
        for vector, fragment in zip(vectors, self._fragments, strict=True):
            load_vector(vector, fragment)

    def stand_in_for_gradients(self, make: Callable[[Tensor], Tensor]) -> None:
        """Exchange `make(parameters)` instead of changes, because a rehearsal changes nothing."""
        self._averaging.stand_ins = list(map(make, self._outer.values))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within the `with` block, load the outer model's parameters, for example for a test."""
        if self._running is not None:
            self._wait(self._running)
        own = self.own_parameters()
        self.load_own_parameters(self._outer.values)
        try:
            yield
        finally:
            self.load_own_parameters(own)

    def state_dict(self) -> dict[str, Any]:
        """Return this worker's state, without model and optimizer, which you save separately.

        The state contains only tensors and plain values, so that `torch.load` can read it with
        `weights_only`.
        """
        running = self._running
        if running is not None and self._wait(running).peer_state is not None:
            self._load()
            running = None
        return {
            "outer": self._outer.state_dict(),
            **self._place.state_dict(),
            "num_steps": self._steps.count,
            "own": {
                "worker": (self._workers.rank, self._workers.count),
                "weights": list(self._place.weights),
                "feedback": self._averaging.codecs.state_dict(),
                **(NO_EXCHANGE if running is None else running.state()),
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`: each worker from its own, or all workers from the same.

        After this call, load the model and optimizer. Raises InvalidInput if the state was saved
        for another model, or with another number of fragments.
        """
        self._outer.load_state_dict(state["outer"])
        self._place.load_state_dict(state)
        self._steps.count = state["num_steps"]
        self._averaging.codecs.load_state_dict({})
        self._running, own = None, state["own"]
        if own is None:
            return
        # error feedback is valid only for the same rank of the same number of workers
        if tuple(own["worker"]) == (self._workers.rank, self._workers.count):
            self._averaging.codecs.load_state_dict(own["feedback"])
        self._place.weights = list(own["weights"])
        if own["due"] is not None:
            number = self._place.num_exchanges - 1
            fragment = number % self._rounds.fragments
            self._running = RunningExchange.of_state(own, number, fragment)

    def _after_step(self) -> None:
        """After an inner step, load a result if one is due, and start an exchange if due."""
        if not (isfinite(self.weight) and self.weight >= 0):
            raise InvalidInput("weight", "must be finite and at least 0", got=self.weight)
        self._place.step(self.weight)
        if self._running is not None and self._steps.count >= self._running.due:
            self._load()
        if self._place.is_due():
            self._send(self._steps.count + self._rounds.delay)
            if not self._rounds.delay:
                self._load()

    def _send(self, due: int, *, is_closing: bool = False) -> None:
        """Start the next fragment's exchange, whose result is loaded after inner step `due`."""
        place, sent_s = self._place, time.monotonic()
        number, fragment = place.num_exchanges, place.fragment
        own = flatten(self._fragments[fragment], self._outer.dtype)
        buffers = self._model.buffers() if place.ends_round else ()
        copies = [one.detach().cpu().clone() for one in buffers]
        is_trained_meanwhile = due > self._steps.count and self._rounds.mixing is None
        sent = [own.clone()] if is_trained_meanwhile else []  # the exchange overwrites `own`
        given = Contribution(number, fragment, place.send(), own, copies, is_closing)
        self._running = RunningExchange(given, due, sent_s, sent)
        self._running.start(self._thread, self._workers.exchange, self._step)

    def _step(self, found: Averaged) -> None:
        """Take the outer step after an exchange, in the exchange's thread."""
        if found.mean is not None:
            step = self._rounds.outer_step(self._workers.count, *self._chosen_by)
            self._outer.step(found.given.fragment, found.mean, step)
        self._averaging.digest = self._outer.digest(found.given.fragment)

    def _wait(self, exchange: RunningExchange) -> Averaged:
        """Wait for an exchange and return its result; if the exchange failed, abort and raise."""
        try:
            return exchange.wait()
        except BaseException:
            self.abort()
            raise

    def _load(self, mixing: float | None = None) -> None:
        """Load a running exchange's result; `mixing`: weight of the worker's own parameters."""
        if (exchange := self._running) is None:
            return
        found, self._running = self._wait(exchange), None
        given, loading_s = found.given, time.monotonic()
        if found.peer_state is not None:
            self._load_peer_state(found.peer_state, given)
        elif self._workers.rank in found.left_out:
            self._begin_anew()
        else:
            group, own = self._outer.values[given.fragment], self._fragments[given.fragment]
            if exchange.sent:
                add_change(exchange.sent[0], group, own)
            else:
                load_vector(group, own, (self._rounds.mixing or 0.0) if mixing is None else mixing)
        if not self._workers.rank:
            found.warn(self._place.num_exchanges)
        with torch.no_grad():
            for buffer, group in zip(self._model.buffers(), given.buffers, strict=False):
                buffer.copy_(group)
        self.log.add(exchange, loading_s)

    def _exchange_now(self, *, is_closing: bool = True) -> Averaged:
        """Exchange the next fragment, wait, and load the result; return the result."""
        self._send(self._steps.count, is_closing=is_closing)
        assert self._running is not None
        found = self._wait(self._running)
        self._load(mixing=0.0)
        return found

    def _begin_anew(self) -> None:
        """Load all parameters of the outer model, and clear the optimizer states."""
        self.load_own_parameters(self._outer.values)
        self._place.reset_weights()
        for optimizer in self._steps.optimizers:
            optimizer.state.clear()

    def _load_peer_state(self, state: InnerState, given: Contribution) -> None:
        """Load a peer's parameters, optimizer states and position in the round of exchanges."""
        self._begin_anew()
        state.load_into(self._model, self._steps.optimizers)
        self._steps.count = state.num_steps
        self._place.resume_after(given.number)
        given.buffers[:] = given.buffers or state.buffers

    def _elastic(
        self, manager: "Manager | None", settings: Settings, deadline_s: float | None
    ) -> ElasticWorkers:
        """Create the connection to the workers of the torchft manager's quorums."""
        if deadline_s is None:
            deadline_s = default_pg_timeout.total_seconds()
        optimizers = self._steps.optimizers
        return ElasticWorkers(
            manager,
            self._averaging,
            settings={**settings, "outer step": list(self._rounds.outer_step(2, *self._chosen_by))},
            lock=StepLock(optimizers, deadline_s),
            inner=lambda: InnerState.of(self._model, optimizers, self._steps.count),
            deadline_s=deadline_s,
        )

    def abort(self) -> None:
        """Remove the hooks and disconnect, without exchanging the remaining changes."""
        if not self._is_open:
            return
        self._is_open = False
        atexit.unregister(self._at_exit)
        for one in self._suspended:
            one.require_backward_grad_sync = True
        running, self._running = self._running, None
        if running is not None and not running.is_done:
            self._workers.abort()
        self._thread.close()
        self._steps.remove()  # also unlocks the optimizers, whose state no peer copies any more
        self._workers.close()
