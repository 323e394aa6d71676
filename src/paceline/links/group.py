"""The process group of a run, and who is in it."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from paceline.core.errors import InvalidInput, WorkerLost

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LOST_MARKS = ("Connection closed by peer", "Connection reset by peer", "Timed out", "timeout")


@dataclass(frozen=True)
class Member:
    """A rank as the others know it: which process it is, and of which booted kernel."""

    rank: int
    pid: int
    boot_id: str


@dataclass(frozen=True)
class Group:
    """This process's place in the run."""

    rank: int
    world_size: int
    device: torch.device
    members: tuple[Member, ...]
    store: Store | None

    @property
    def boot_id(self) -> str:
        """Which booted kernel this process runs on: ranks with the same one share a clock."""
        return self.members[self.rank].boot_id

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order, on every rank. Values are sent as JSON."""
        data = json.dumps(value).encode()
        if self.world_size == 1:
            return [json.loads(data)]
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in self.members]
        dist.all_gather(sizes, torch.tensor([len(data)], device=self.device))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = [torch.empty_like(padded) for _ in self.members]
        dist.all_gather(rows, padded)
        texts = [bytes(row[: int(size)].tolist()) for row, size in zip(rows, sizes, strict=True)]
        return [json.loads(text) for text in texts]

    def first_to_say(self, text: str) -> bool:
        """Whether no other rank has asked this about the same text: for errors that all find."""
        if self.store is None:
            return True
        return bool(self.store.add(f"paceline/said/{text}", 1) == 1)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier()


@contextmanager
def process_group(deadline_s: float) -> Iterator[Group]:
    """Join the run that the environment describes, as torchrun and Paceline's launcher set it.

    Without RANK in the environment this process is alone. No collective waits longer than
    `deadline_s`. Raises WorkerLost in place of torch's error when a peer is gone.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = _device(int(os.environ.get("LOCAL_RANK", "0")))
    myself = Member(rank, os.getpid(), _BOOT_ID.read_text().strip())
    if world_size == 1:
        yield Group(rank, world_size, device, (myself,), None)
        return
    deadline = timedelta(seconds=deadline_s)
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=deadline))
    store.set_timeout(deadline)
    members = _introduce(myself, world_size, store)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=deadline
    )
    try:
        yield Group(rank, world_size, device, members, store)
    except RuntimeError as error:  # torch's own kinds of errors are all of this one
        if any(mark in str(error) for mark in _LOST_MARKS):
            raise WorkerLost(_who_is_lost(members, rank, error)) from error
        raise
    finally:
        # After an error the peers may be gone, and saying goodbye would wait for them.
        if sys.exc_info()[0] is None:
            dist.destroy_process_group()


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise InvalidInput(
            f"workers: local rank {local_rank} has no GPU of its own, "
            f"for this machine has {torch.cuda.device_count()}; start fewer workers"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _introduce(myself: Member, world_size: int, store: Store) -> tuple[Member, ...]:
    """Tell the others who this is, and learn who they are."""
    store.set(f"paceline/member/{myself.rank}", json.dumps([myself.pid, myself.boot_id]))
    rows = [json.loads(store.get(f"paceline/member/{rank}")) for rank in range(world_size)]
    return tuple(Member(rank, pid, boot_id) for rank, (pid, boot_id) in enumerate(rows))


def _who_is_lost(members: tuple[Member, ...], rank: int, error: RuntimeError) -> str:
    gone = [
        f"worker {member.rank} (process {member.pid})"
        for member in members
        if member.boot_id == members[rank].boot_id and not _alive(member.pid)
    ]
    reason = str(error).splitlines()[0]
    if gone:
        return f"worker {rank} stops: {', '.join(gone)} died in the middle of the run"
    return f"worker {rank} stops: another worker does not answer ({reason})"


def _alive(pid: int) -> bool:
    """Whether the process runs; one that has ended but was not yet waited for does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
