"""Sum gradients in memory shared by the ranks of one machine."""

import os
import select
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.errors import StepDiscarded, WorkerLost
from paceline.links.group import Group, Member
from paceline.links.shared_memory import find_local_ranks, share
from paceline.native import Arena as NativeArena
from paceline.native import DType, Fault, Goal, Status, arena_nbytes

_DTYPES = {
    torch.float32: DType.FLOAT32,
    torch.float64: DType.FLOAT64,
    torch.bfloat16: DType.BFLOAT16,
    torch.float16: DType.FLOAT16,
}
_EXPECTED = {  # what a silent rank should have done, for error texts
    Fault.POST: "deliver the gradients of step {step}",
    Fault.SUM: "finish its part of the sum of step {step}",
    Fault.PUBLISH: "pass on the sum of step {step} over all machines",
    Fault.DRAIN: "leave the discarded step {step}",
}


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    """Return the address and number of bytes of a dense tensor in host memory."""
    is_dense = tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)
    if not tensor.is_cpu or not is_dense:
        raise ValueError("only dense tensors in host memory can be copied")
    return tensor.data_ptr(), tensor.nbytes


class _PeerProcesses:
    """Watches the processes of a machine's other ranks."""

    def __init__(self, members: Sequence[Member], rank: int) -> None:
        # Watch pidfds, because the kernel may give the number of an ended process to a new process.
        self._local_rank_of: dict[int, int] = {}
        self._members = members
        for local_rank, member in enumerate(members):
            if member.rank != rank:
                self._local_rank_of[os.pidfd_open(member.pid)] = local_rank

    def gone(self) -> list[int]:
        """Return the local ranks whose processes have ended."""
        ended = select.poll()  # a new object per call, because several threads make calls
        for pidfd in self._local_rank_of:
            ended.register(pidfd, select.POLLIN)
        return sorted(self._local_rank_of[pidfd] for pidfd, _ in ended.poll(0))

    def name(self, local_rank: int) -> str:
        """Return the name of a rank for error texts."""
        return self._members[local_rank].title

    def why_lost(self, lost: Sequence[tuple[int, Fault]], step: int, deadline_s: float) -> str:
        """Return an error text that names the dead ranks or, if none is dead, the silent ranks."""
        dead = [self.name(local_rank) for local_rank, fault in lost if fault is Fault.DIED]
        if dead:
            return f"{', '.join(dead)} died in the middle of the run"
        names = ", ".join(self.name(local_rank) for local_rank, _ in lost)
        return f"{names} did not {_EXPECTED[lost[0][1]].format(step=step)} within {deadline_s:g} s"

    def close(self) -> None:
        """Stop watching. May be called twice."""
        while self._local_rank_of:
            os.close(self._local_rank_of.popitem()[0])

    def __del__(self) -> None:
        self.close()


class Arena:
    """One rank's view of the memory that the ranks of its machine share.

    All ranks of `group` must construct the arena together. In each step a rank calls `begin`, then
    writes gradients to its `slot`, and calls `post` for every chunk (part of the slot) that it has
    written. At the end it calls `commit` and `wait_step`, or `discard` if its backward has failed.
    Once all ranks have posted a chunk, any idle rank sums it in rank order,
    (((s0 + s1) + s2) + ...) * scale, so that all ranks read the same bits. The sums of step n stay
    valid until the ranks begin step n + 2.

    Waiting raises StepDiscarded if a rank discarded the step, and WorkerLost if a rank died or has
    not done its part after `deadline_s`. The constructor raises InvalidInput on all ranks if a rank
    cannot map the memory.

    `scale`: 1 / world_size by default.
    `held`: if True, a step is complete only after the machine's first rank has called `publish`
    for every chunk. Default: True if the ranks are on several machines.
    `members`: the global ranks on this machine, ascending. A local rank is an index of `members`.
    `leaders`: the first rank of each machine, ascending.
    `slots`: one tensor, uint8 [slot_nbytes], per local rank. A rank writes only to its own slot.
    `flags`: numbers that ranks tell each other, uint8 [local rank, flag, step % 2]. A rank writes
    its flags before `commit`; all ranks may read them after `wait_step`.
    """

    def __init__(
        self,
        group: Group,
        slot_nbytes: int,
        max_chunks: int,
        num_flags: int,
        deadline_s: float,
        scale: float | None = None,
        held: bool | None = None,
    ) -> None:
        place = find_local_ranks(group)
        self.members, self.leaders = place.members, place.leaders
        self.local_rank = place.members.index(group.rank)
        sizes = (len(place.members), slot_nbytes, max_chunks, num_flags)
        held = len(place.leaders) > 1 if held is None else held
        fd = share(group, place, arena_nbytes(*sizes))
        problem = None
        # If each rank has its own core, a waiting rank spins longer before it sleeps. Not with
        # `held`: there, a second thread of the rank waits, and its spinning would slow the rank.
        own_core = place.num_cores >= len(place.members) and not held
        spare_core = place.num_cores >= 2 * len(place.members)
        scale = 1 / group.world_size if scale is None else scale
        try:
            self._peers = _PeerProcesses([group.members[i] for i in self.members], group.rank)
            how = held, own_core, spare_core
            native = NativeArena(fd, self.local_rank, *sizes, scale, *how)
        except (OSError, RuntimeError) as error:
            problem = f"workers: worker {group.rank} cannot map shared memory: {error}"
        try:
            group.check(problem)
        finally:
            # All ranks have tried to map the memory, so close its descriptor. The kernel then frees
            # the memory with the last mapping, even after kill -9.
            os.close(fd)
        self.slots = tuple(torch.from_numpy(native.slot(i)) for i in range(len(place.members)))
        self.slot = self.slots[self.local_rank]
        self.flags = torch.from_numpy(native.flags()).permute(1, 2, 0)
        self._native: NativeArena | None = native
        self._deadline_s, self._step, self._is_open = deadline_s, 0, False
        self._discarded: StepDiscarded | None = None

    def shared_result(self, step: int) -> Tensor:
        """View the sums of a step, uint8 [slot_nbytes], that all local ranks share.

        Only the machine's first rank may write to them.
        """
        return torch.from_numpy(self._opened().shared_result(step % 2))

    def result(self, step: int) -> Tensor:
        """Return the sums of a step, uint8 [slot_nbytes], as a private copy-on-write view."""
        return torch.from_numpy(self._opened().result(step % 2))

    def refresh(self, step: int) -> int:
        """Restore the sums that this rank has overwritten in `result`; return how many bytes."""
        return self._opened().refresh(step % 2)

    def set_chunks(self, chunks: Sequence[Sequence[tuple[int, int, torch.dtype]]]) -> None:
        """Set each chunk's segments, which must not overlap; call on all ranks, between steps.

        A segment is a tuple: byte offset in each rank's slot, number of values, and dtype.
        """
        self._opened().set_chunks(
            [[(offset, count, _DTYPES[dtype]) for offset, count, dtype in one] for one in chunks]
        )

    def begin(self, step: int) -> None:
        """Begin a step; step numbers ascend from 1, and are equal on all ranks."""
        if self._is_open or step <= self._step:
            raise RuntimeError(
                f"cannot begin step {step} after step {self._step}, which must be earlier and ended"
            )
        self._opened().begin(step)
        self._step, self._is_open = step, True
        self._discarded = None

    def copy_in(self, sources: Sequence[tuple[int, Tensor]]) -> None:
        """Copy dense host tensors into this rank's slot; `sources`: (byte offset, tensor)."""
        self._opened().copy_in(
            self.local_rank, [(offset, *_bytes_of(source)) for offset, source in sources]
        )

    def copy_out(self, step: int, offset: int, target: Tensor) -> None:
        """Copy the sums from byte `offset` into the bytes of `target`, a dense host tensor."""
        address, nbytes = _bytes_of(target)
        self._opened().copy_out(step % 2, offset, address, nbytes)

    def post(self, chunk: int) -> None:
        """Mark this rank's gradients of a chunk as complete; call once per chunk and step."""
        self._check_open()
        self._opened().post(chunk)

    def publish(self) -> None:
        """Mark one more chunk, in the order of chunks, as summed over all machines.

        Only with `held`: the first rank of each machine calls this method.
        """
        self._check_open()
        self._opened().publish()

    def commit(self) -> None:
        """Mark this rank's backward pass as complete; the rank must have posted all chunks."""
        self._check_open()
        if self._opened().is_discarded(self._step):
            raise self._leave_discarded()
        self._opened().commit()

    def wait_chunk(self, chunk: int) -> None:
        """Wait until a chunk is summed over the ranks of this machine."""
        self._check_open()
        self._wait(Goal.CHUNK, chunk)

    def wait_step(self) -> None:
        """Wait until all ranks have committed the step and all its chunks are complete."""
        self._check_open()
        self._wait(Goal.STEP)
        self._is_open = False

    def discard(self) -> None:
        """Discard the step on all ranks, because this rank's backward pass has failed.

        Not allowed after `commit`, because other ranks may already use the sums. Waits until no
        rank works on the step.
        """
        if self._discarded is not None:
            return
        self._check_open()
        self._opened().discard()
        self._leave_discarded()

    def times(self, chunk: int) -> tuple[float, float]:
        """Return when all ranks had posted a chunk, and when it was summed (monotonic seconds)."""
        posted_ns, reduced_ns = self._opened().times(chunk)
        return posted_ns / 1e9, reduced_ns / 1e9

    def close(self) -> None:
        """Stop summing; the memory is freed once no tensor views it. May be called twice."""
        self._native = None
        self.slots, self.slot, self.flags = (), torch.empty(0), torch.empty(0)
        self._peers.close()

    def _opened(self) -> NativeArena:
        if self._native is None:
            raise RuntimeError("the arena is closed")
        return self._native

    def _check_open(self) -> None:
        if self._discarded is not None:
            raise self._leave_discarded()
        if not self._is_open:
            raise RuntimeError(f"no step is open after step {self._step}; call begin() first")

    def _wait(self, goal: Goal, chunk: int = 0) -> None:
        """Wait for `goal`; meanwhile handle signals, and check the deadline and peer processes."""
        native, until = self._opened(), time.monotonic() + self._deadline_s
        while (status := native.wait(goal, self._step, chunk)) is not Status.REACHED:
            if status is Status.DISCARDED:
                raise self._leave_discarded()
            if status is Status.PENDING and (gone := self._peers.gone()):
                # A peer may have done its part of the step before it ended normally.
                if native.wait(goal, self._step, chunk) is Status.REACHED:
                    return
                for local_rank in gone:
                    native.give_up(local_rank, Fault.DIED)
            if time.monotonic() > until:
                for local_rank, fault in native.missing(goal, self._step, chunk):
                    native.give_up(local_rank, fault)
            if lost := native.lost():
                raise WorkerLost(self._peers.why_lost(lost, self._step, self._deadline_s))

    def _leave_discarded(self) -> StepDiscarded:
        """Wait until no rank works on the discarded step; return StepDiscarded to raise."""
        native = self._opened()
        if self._discarded is None:
            culprit = self._peers.name(native.discarded_by())
            self._discarded = StepDiscarded(
                f"step {self._step} is discarded on all workers: {culprit} failed"
            )
        self._is_open = False
        native.drain()
        self._wait(Goal.DRAINED)
        return self._discarded
