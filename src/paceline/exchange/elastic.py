"""Average models of a changing set of workers, which torchft determines before each exchange.

An exchange, which averages the workers' changes of the model (module `outer`), has three phases:

quorum      torchft's lighthouse chooses the members; new and late workers load a peer's state
averaging   the members exchange headers, and then the mean of their changes
commit      without an error: apply the mean (the outer step); after an error: repeat the exchange

The remaining workers repeat a failed exchange with the same values. A failed exchange changes no
state: error feedback is restored before the repetition, and the outer step follows the commit.

A peer sends its state over the quorum's process group, so no port is opened. torchft's own
transports unpickle data from peers. For safety, a state is sent as JSON and tensors instead:

length     int64                   number of bytes of the header
header     JSON                    the plain values; the names, dtypes and shapes of the tensors
tensors    bytes                   one message for each tensor
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from math import inf
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.checkpoints.json_values import Json, apart, dumps, loads, together
from paceline.checkpoints.tensor_file import Tensors, check_can_be_saved
from paceline.core.errors import InvalidInput, WorkerLost, first_line
from paceline.exchange.inner_steps import InnerState, StepLock
from paceline.exchange.outer import Averaged, Averaging, Contribution
from paceline.exchange.workers import Settings, check_same_settings
from paceline.links.group import Group, Member, myself
from paceline.links.tensor_messages import bytes_of, empty_of, spec_of

if TYPE_CHECKING:
    from torchft import Manager

logger = logging.getLogger(__name__)
_KEY = "paceline"  # key under which the state is registered with the torchft manager
_PAUSE_S = 0.1  # pause before an exchange is repeated
_CPU = torch.device("cpu")
_MAX_HEADER_NBYTES = 1 << 28


class ElasticWorkers:
    """Averages models over a torchft.Manager's quorum, whose workers may change at each exchange.

    `averaging`: computes the mean over a group. `settings`: must be equal on all workers. `inner()`
    copies this worker's buffers and optimizer states. `lock`: prevents optimizer steps while the
    state is copied. A failed exchange is repeated for at most `deadline_s`. Raises InvalidInput for
    an unsuitable manager (see `checked_manager`).
    """

    def __init__(
        self,
        manager: object,
        averaging: Averaging,
        *,
        settings: Settings,
        lock: StepLock,
        inner: Callable[[], InnerState],
        deadline_s: float,
    ) -> None:
        self._manager = checked_manager(manager)
        self._averaging, self._outer = averaging, averaging.outer
        self._num_fragments = num_fragments = len(self._outer.values)
        self._settings, self._inner, self._deadline_s = settings, inner, deadline_s
        self.lock = lock
        # number of exchanges after the first in which all workers had finished: one for each other
        # fragment, and then `_farewell`
        self.num_final_exchanges = num_fragments
        self._group: Group | None = None
        self._given: Contribution  # this worker's contribution to the current exchange
        self._peer_state: InnerState | None = None
        self._feedback: dict[str, Tensor] = {}  # error feedback before the current exchange
        self._is_open = True
        # number of the first exchange in which all workers had finished training
        self._all_closing_since: int | None = None
        inner()  # to raise an error now, not in training, if an optimizer's state cannot be sent
        _replace_transport(self._manager, PeerTransport(self._backend))
        self._manager.register_state_dict_fn(_KEY, self._load_state, self._state)

    @property
    def rank(self) -> int:
        """This worker's rank in the last quorum; 0 before the first."""
        return 0 if self._group is None else self._group.rank

    @property
    def count(self) -> int:
        """The number of workers in the last quorum; 1 before the first."""
        return 1 if self._group is None else self._group.world_size

    def exchange(self, given: Contribution) -> Averaged:
        """Average the workers' contributions; repeat until all remaining workers commit the mean.

        Raises WorkerLost if this fails for `deadline_s` seconds, or if there is no quorum.
        """
        self._given, self._peer_state = given, None
        try:
            if given.number > self._farewell_number:
                return self._nothing()
            self._feedback = self._averaging.codecs.state_dict()
            return self._farewell() if given.number == self._farewell_number else self._repeated()
        except BaseException:
            self._disconnect()
            raise

    def abort(self) -> None:
        """Abort an exchange that another thread runs, unless it still waits for a quorum."""
        self._is_open = False
        control: Any = self._group and self._group.control
        if control is not None:  # `_disconnect` has already closed it otherwise
            control.abort()

    def close(self) -> None:
        """Do nothing, because the user shuts down the manager."""

    def _repeated(self) -> Averaged:
        until: float | None = None
        while True:
            found = self._attempt()
            if found is not None:
                return found
            if self._given.is_closing and self._given.number == self._farewell_number:
                return self._nothing()  # this worker has just loaded its peers' final state
            if until is None:
                until = time.monotonic() + self._deadline_s
            elif time.monotonic() > until:
                raise WorkerLost(f"no exchange with other workers for {self._deadline_s:g} s")
            self._averaging.codecs.load_state_dict(self._feedback)
            time.sleep(_PAUSE_S)

    def _attempt(self) -> Averaged | None:
        """Form a quorum and exchange once; return the result, or None if not committed."""
        found = None
        try:
            # a worker with fewer steps than its peers loads a peer's state within this call
            self._manager.start_quorum()
        except (RuntimeError, TimeoutError) as error:
            raise WorkerLost(f"torchft formed no quorum ({first_line(error)})") from error
        try:
            if self._manager.errored() is None:  # no error in `start_quorum`
                # copy the contribution for a repetition, because `Averaging` overwrites its tensors
                own = self._given.own.clone()
                buffers = [one.clone() for one in self._given.buffers]
                copied = self._given._replace(own=own, buffers=buffers)
                # store the group in no variable, which after an error would keep connections open
                found = self._averaging.run(copied, self._configured())
        except (RuntimeError, OSError, WorkerLost) as error:
            self._failed(error)
        if self._manager.errored() is not None:
            self._disconnect()
        if not self._commits() or found is None:
            return None
        if not found.all_closing:
            self._all_closing_since = None
        elif self._all_closing_since is None:
            self._all_closing_since = found.given.number
        return replace(found, peer_state=self._peer_state)

    def _configured(self) -> Group:
        """Return the quorum's group; if its size or this worker's rank changed, reset feedback."""
        backend, before = self._backend(), self._group
        if before is not None and before.control is backend:
            return before
        rank, size = backend.rank(), backend.size()
        member = myself(rank, _CPU)
        unknown = Group(
            rank, size, _CPU, (member,) * size, None, backend, self._deadline_s, backend
        )
        members = tuple(Member(*row) for row in unknown.gather(member))
        self._group = replace(unknown, members=members)
        if before is not None and (before.rank, before.world_size) != (rank, size):
            self._forget_feedback()
        if before is not None and before.world_size != size and not rank:
            changed = "exchange %d: number of workers changed from %d to %d"
            logger.warning(changed, self._given.number, before.world_size, size)
        return self._group

    def _failed(self, error: Exception) -> None:
        """Report `error` to torchft, so that workers repeat; after `abort`, raise WorkerLost."""
        if not self._is_open:
            raise WorkerLost("this worker aborted the exchange") from error
        logger.warning("exchange %d is repeated: %s", self._given.number, first_line(error))
        # report a new error, because the traceback of `error` would keep connections open
        self._manager.report_error(WorkerLost(first_line(error)))

    def _disconnect(self) -> None:
        """Close this worker's connections, so that peers do not wait for it."""
        # gloo closes connections when the last reference to their group is dropped
        self._group = self._group and replace(self._group, control=None, process_group=None)
        process_group: Any = self._manager._pg
        process_group.abort()

    def _commits(self) -> bool:
        """Return whether torchft commits the exchange: only if no process of this worker failed."""
        for _ in range(2):  # the first call may time out if this process was suspended meanwhile
            try:
                is_committed: bool = self._manager.should_commit()
                return is_committed
            except (RuntimeError, TimeoutError) as error:
                failure = error
                self._manager.report_error(error)
        raise WorkerLost(f"torchft cannot commit an exchange ({first_line(failure)})") from failure

    @property
    def _farewell_number(self) -> float:
        """Number of the last exchange, `_farewell`; infinite until all workers have finished."""
        since = self._all_closing_since
        return inf if since is None else since + self._num_fragments

    def _farewell(self) -> Averaged:
        """Try one last exchange, so that late workers can load the final state."""
        try:
            return self._attempt() or self._nothing()
        except WorkerLost as error:
            logger.warning("the last exchange failed: %s", error)
            return self._nothing()

    def _nothing(self) -> Averaged:
        """Return a result without a mean, but with a peer's state if one was loaded."""
        return Averaged(self._given, None, (), (), True, self._peer_state)

    def _state(self) -> dict[str, Any]:
        """Return the state that torchft sends to new and late peers; called within a quorum."""
        with self.lock:
            inner = self._inner()
        return {
            "settings": dict(self._settings),
            "number": self._given.number,
            "all_closing_since": self._all_closing_since,
            "digest": self._averaging.digest,
            "outer": self._outer.state_dict(),
            "inner": vars(inner),
        }

    def _load_state(self, state: dict[str, Any]) -> None:
        """Load a peer's outer model; the training loop later loads its buffers and optimizers.

        This worker's steps since its last exchange are lost.
        """
        check_same_settings(self._settings, state["settings"], "this worker", "its peers")
        self._outer.load_state_dict(state["outer"])
        self._averaging.digest = state["digest"]
        self._forget_feedback()
        self._all_closing_since = state["all_closing_since"]
        self._peer_state = InnerState(**state["inner"])
        number = state["number"]
        fragment = number % self._num_fragments
        self._given = Contribution(
            number,
            fragment,
            0.0,
            self._outer.values[fragment].clone(),
            self._peer_state.buffers if fragment == self._num_fragments - 1 else [],
            self._given.is_closing,
        )

    def _forget_feedback(self) -> None:
        self._feedback = {}
        self._averaging.codecs.load_state_dict({})

    def _backend(self) -> Any:
        process_group: Any = self._manager._pg
        return process_group.parent._get_backend(_CPU)


class PeerTransport:
    """A torchft CheckpointTransport that sends nested dicts and lists of tensors without pickle.

    `group()` returns the current quorum's process group. Its timeout limits each tensor's transfer.
    """

    def __init__(self, group: Callable[[], Any]) -> None:
        self._group = group

    def metadata(self) -> str:
        """Return an empty string, because `recv_checkpoint` needs only the sender's rank."""
        return ""

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: Json, timeout: timedelta
    ) -> None:
        """Send a state to the ranks in `dst_ranks`, one rank after another."""
        del step, timeout
        values, found = apart(state_dict)
        tensors = {name: one.detach().to("cpu").contiguous() for name, one in found.items()}
        for name, one in tensors.items():
            check_can_be_saved(name, one)
        text = bytearray(dumps("state", (values, spec_of(tensors))))
        header = torch.frombuffer(text, dtype=torch.uint8)
        for rank in dst_ranks:
            self._send(torch.tensor([len(header)]), rank)
            self._send(header, rank)
            for tensor in tensors.values():
                self._send(bytes_of(tensor), rank)

    def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: timedelta
    ) -> dict[str, Any]:
        """Receive a state from rank `src_rank`; raises InvalidInput if it is malformed."""
        del metadata, step, timeout
        length = int(self._received(torch.empty(1, dtype=torch.int64), src_rank))
        if not 0 < length <= _MAX_HEADER_NBYTES:
            problem = (
                f"must have a header of 1 to {_MAX_HEADER_NBYTES} bytes (from worker {src_rank})"
            )
            raise InvalidInput("state", problem, got=length)
        header = self._received(torch.empty(length, dtype=torch.uint8), src_rank)
        tensors: Tensors = {}
        try:
            values, rows = loads(header.numpy().tobytes())
            for name, dtype, shape in rows:
                tensors[name] = empty_of(dtype, shape)
                self._received(bytes_of(tensors[name]), src_rank)
            state: dict[str, Any] = together(values, tensors)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            problem = f"is malformed, as received from worker {src_rank}: {error}"
            raise InvalidInput("state", problem) from None
        return state

    def disallow_checkpoint(self) -> None:
        """Do nothing, because `send_checkpoint` has sent a copy of the state."""

    def shutdown(self, wait: bool = True) -> None:
        """Do nothing: the manager shuts down the process group, and nothing else is open."""

    def _send(self, tensor: Tensor, rank: int) -> None:
        if tensor.numel():
            work = dist.isend(tensor, group=self._group(), group_dst=rank)
            assert work is not None
            work.wait()

    def _received(self, tensor: Tensor, rank: int) -> Tensor:
        if tensor.numel():
            work = dist.irecv(tensor, group=self._group(), group_src=rank)
            assert work is not None
            work.wait()
        return tensor


def checked_manager(manager: object) -> "Manager":
    """Check that `manager` is a torchft.Manager that Paceline can use, and return it.

    Raises InvalidInput for asynchronous quorums, a backend other than gloo, or a manager in use.
    """
    try:
        from torchft import Manager, ProcessGroupGloo
    except ImportError as error:
        problem, hint = f"requires torchft ({first_line(error)})", "pip install 'paceline[elastic]'"
        raise InvalidInput("manager", problem, hint=hint) from None
    if not isinstance(manager, Manager):
        raise InvalidInput("manager", "must be a torchft.Manager", got=type(manager).__name__)
    if manager._use_async_quorum:
        raise InvalidInput("manager", "requires use_async_quorum=False")
    if not isinstance(manager._pg, ProcessGroupGloo):
        problem = "requires pg=torchft.ProcessGroupGloo(timeout)"
        raise InvalidInput("manager", problem, got=type(manager._pg).__name__)
    if _KEY in manager._user_state_dicts:
        raise InvalidInput(
            "manager", "is already used by another LocalUpdates", hint="create a second manager"
        )
    return manager


def _replace_transport(manager: "Manager", transport: PeerTransport) -> None:
    """Replace the manager's checkpoint transport, because torchft's unpickles received data."""
    before: Any = manager._checkpoint_transport
    before.shutdown()
    if (server := getattr(before, "_server", None)) is not None:
        server.server_close()  # torchft does not close the port
    manager._checkpoint_transport = transport
