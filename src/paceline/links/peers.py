"""The other ranks of this machine: whether they live, and what to say of those that do not."""

import os
import select
from collections.abc import Sequence

from paceline.links.shared_memory import Place
from paceline.native import Fault

_NOT_DONE = {
    Fault.POST: "delivered its gradients of step {step}",
    Fault.COMMIT: "delivered its gradients of step {step}",
    Fault.SUM: "finished its part of the sum of step {step}",
    Fault.PUBLISH: "passed on the sum of step {step} over all machines",
    Fault.DRAIN: "left step {step}, which is discarded,",
}


class Peers:
    """The ranks of a place, watched through descriptors that no later process can take over."""

    def __init__(self, place: Place, rank: int) -> None:
        self._place = place
        self._local_rank_of: dict[int, int] = {}
        for local_rank, (member, pid) in enumerate(zip(place.members, place.pids, strict=True)):
            if member != rank:
                pidfd = os.pidfd_open(pid)
                self._local_rank_of[pidfd] = local_rank

    def gone(self) -> list[int]:
        """Return the local ranks whose processes have ended."""
        ended = select.poll()  # its own, for one cannot be used by two threads at once
        for pidfd in self._local_rank_of:
            ended.register(pidfd, select.POLLIN)
        return sorted(self._local_rank_of[pidfd] for pidfd, _ in ended.poll(0))

    def name(self, local_rank: int) -> str:
        """Return how messages call a rank."""
        return f"worker {self._place.members[local_rank]} (process {self._place.pids[local_rank]})"

    def why_lost(self, lost: Sequence[tuple[int, Fault]], step: int, deadline_s: float) -> str:
        """Return what to say of ranks that were given up: of the dead ones, if there are any."""
        dead = [self.name(local_rank) for local_rank, fault in lost if fault is Fault.DIED]
        if dead:
            return f"{', '.join(dead)} died in the middle of the run"
        names = ", ".join(self.name(local_rank) for local_rank, _ in lost)
        not_done = _NOT_DONE[lost[0][1]].format(step=step)
        verb, have = ("does", "it has") if len(lost) == 1 else ("do", "they have")
        not_done = not_done if len(lost) == 1 else not_done.replace(" its ", " their ")
        return f"{names} {verb} not answer: {have} not {not_done} within {deadline_s:g} s"

    def close(self) -> None:
        """Watch no more. Closing twice is fine."""
        while self._local_rank_of:
            os.close(self._local_rank_of.popitem()[0])

    def __del__(self) -> None:
        if hasattr(self, "_local_rank_of"):
            self.close()
