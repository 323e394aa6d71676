"""The group of a run's ranks, which exchange small values."""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from paceline.core.errors import InvalidInput, WorkerLost

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")
# Parts of the error texts of gloo and NCCL: torch has no error type for a lost peer.
_LOST_MARKS = ("Connection closed by peer", "Connection reset by peer", "imed out", "timeout")
_SHORT = 256  # values of at most this many bytes need one exchange, longer values two
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
_SETTLING_S = 1.0  # longest time until the kernel reports a killed process as dead


class Member(NamedTuple):
    """The identity of a rank.

    Ranks with equal `boot_id` run on one kernel and share its clock. Their process numbers are
    comparable only if their `pid_namespace` is equal, too.
    """

    rank: int
    pid: int
    boot_id: str
    pid_namespace: str
    device_type: str

    @property
    def place(self) -> tuple[str, str]:
        """The boot id and PID namespace, equal for all ranks of a machine or container."""
        return self.boot_id, self.pid_namespace

    @property
    def title(self) -> str:
        """The rank's name in errors."""
        return f"worker {self.rank} (process {self.pid})"


@dataclass(frozen=True)
class Group:
    """This process's rank in the run, and its process groups.

    `process_group`: the group that exchanges device tensors; None means the default process group.
    `control`: the gloo group that exchanges values in host memory; the same as `process_group` if
    `process_group` is a gloo group.
    `deadline_s`: the longest wait for another rank.
    `exchanges_alone`: a single rank exchanges gradients with itself, as if there were other ranks.
    """

    rank: int
    world_size: int
    device: torch.device
    members: tuple[Member, ...]
    store: Store | None
    control: dist.ProcessGroup | None
    deadline_s: float
    process_group: dist.ProcessGroup | None = None
    exchanges_alone: bool = False

    @classmethod
    def alone(
        cls, device: torch.device, deadline_s: float, process_group: dist.ProcessGroup | None = None
    ) -> Self:
        """Return the group of a single rank, which is this process."""
        return cls(0, 1, device, (myself(0, device),), None, None, deadline_s, process_group)

    @property
    def exchanges(self) -> bool:
        """Whether this rank exchanges gradients, with other ranks or with itself."""
        return self.world_size > 1 or self.exchanges_alone

    @property
    def global_ranks(self) -> list[int]:
        """For each rank of this group, in order, its rank in the default process group."""
        if self.world_size == 1:
            return [self.rank]
        return dist.get_process_group_ranks(self.process_group)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order, on every rank. Values are sent as JSON."""
        data = json.dumps(value).encode()
        if self.world_size == 1:
            return [json.loads(data)]
        # all_gather needs equal sizes: gather lengths and first bytes, and then all other bytes.
        with self.naming_lost_ranks():
            heads = self._gather_bytes(len(data).to_bytes(8) + data[:_SHORT], 8 + _SHORT)
            lengths = [int.from_bytes(head[:8]) for head in heads]
            rest = max(lengths) - _SHORT
            tails = self._gather_bytes(data[_SHORT:], rest) if rest > 0 else [b""] * len(heads)
        texts = [
            (head[8:] + tail)[:length]
            for head, tail, length in zip(heads, tails, lengths, strict=True)
        ]
        return [json.loads(text) for text in texts]

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return each value's maximum over ranks; all ranks pass equally many values."""
        return [max(of_ranks) for of_ranks in zip(*self.gather(list(values)), strict=True)]

    def _gather_bytes(self, data: bytes, size: int) -> list[bytes]:
        """Return every rank's bytes, padded with zeros to `size`."""
        own = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        rows = [torch.empty_like(own) for _ in self.members]
        dist.all_gather(rows, own, group=self.control)
        return [row.numpy().tobytes() for row in rows]

    def check(self, problem: str | None) -> None:
        """Raise InvalidInput on all ranks if any rank passes a `problem`; collective."""
        for found in self.gather(problem):
            if found is not None:
                raise InvalidInput.of(found)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite all ranks' tensors with the values of rank 0's tensors."""
        if self.world_size > 1:
            for tensor in tensors:
                sent = tensor.contiguous()  # PyTorch would send gaps between values, too
                with self.naming_lost_ranks():
                    dist.broadcast(sent, group=self.process_group, group_src=0)
                if sent is not tensor:
                    tensor.copy_(sent)

    def barrier(self) -> None:
        """Wait until all ranks have called this method."""
        if self.world_size > 1:
            with self.naming_lost_ranks():
                dist.barrier(self.control)

    @contextmanager
    def naming_lost_ranks(self) -> Iterator[None]:
        """Replace PyTorch's error for a lost peer by WorkerLost, if the group has no `store`.

        Groups of a user's own program have none. For groups with a `store`, the context manager
        `rendezvous.process_group` replaces the error.
        """
        try:
            yield
        except RuntimeError as error:
            if self.store is not None or not is_loss(error):
                raise
            stopped = self._names_in(_STOPPED)
            silent = f"{stopped} is stopped and does not answer" if stopped else None
            raise WorkerLost(self.died() or silent or unknown_peer(error)) from error

    def dead(self) -> str:
        """Return the names of this machine's ranks whose processes have ended, or ""."""
        return self._names_in(_ENDED)

    def _names_in(self, states: Sequence[str]) -> str:
        """Return the names of ranks on this machine whose process is in one of these states."""
        found, own = [], self.members[self.rank]
        for one in self.members:
            if one.place != own.place:
                continue  # `one.pid` is a process number of another machine or container
            try:
                state = psutil.Process(one.pid).status()
            except psutil.NoSuchProcess:
                state = psutil.STATUS_DEAD
            if state in states:
                found.append(one.title)
        return ", ".join(found)

    def died(self, is_said: Callable[[], bool] = lambda: False) -> str | None:
        """Return an error text that names the dead ranks on this machine.

        Waits up to a second, because the kernel may report a death late. Returns None if no rank
        is dead, or once `is_said()` returns True because another rank has published the error.
        """
        until = time.monotonic() + _SETTLING_S
        while not is_said() and time.monotonic() < until:
            if gone := self.dead():
                return f"{gone} died in the middle of the run"
            time.sleep(0.05)
        return None


def myself(rank: int, device: torch.device) -> Member:
    """Return the identity of this process as rank `rank`."""
    return Member(rank, os.getpid(), boot_id(), str(_PID_NAMESPACE.readlink()), device.type)


def boot_id() -> str:
    """Return the running kernel's identifier; processes with the same identifier share a clock."""
    return _BOOT_ID.read_text().strip()


def is_loss(error: RuntimeError) -> bool:
    """Return True if PyTorch's error means that a peer is gone or does not answer."""
    return isinstance(error, dist.DistNetworkError) or any(
        mark in str(error) for mark in _LOST_MARKS
    )


def unknown_peer(error: BaseException) -> str:
    """Return the text for a lost peer that cannot be identified."""
    return f"another worker does not answer ({str(error).splitlines()[0]})"
