"""Messages between all pairs of ranks, of lengths that both ends know beforehand."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Posted:
    """A message to each other rank of a group, and one from each, on their way since it was made.

    `sent` has the message for each rank, uint8, and `nbytes` the length of that from each; this
    rank's own are left out. All ranks post in the same order. No wait is longer than the group's
    timeout.
    """

    def __init__(
        self, sent: Sequence[Tensor], nbytes: Sequence[int], group: dist.ProcessGroup | None
    ) -> None:
        own, device = dist.get_rank(group), sent[0].device
        lengths = [0 if rank == own else length for rank, length in enumerate(nbytes)]
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        # They are kept until they have gone out.
        self._sent = [empty if rank == own else one for rank, one in enumerate(sent)]
        self.sent_nbytes, self.received_nbytes = sum(map(len, self._sent)), sum(lengths)
        whole = torch.empty(sum(lengths), dtype=torch.uint8, device=device)
        self._received = whole.split(lengths)
        if device.type == "cpu":
            self._works = self._pairs(own, group)
        else:
            sizes = [len(one) for one in self._sent]
            self._sent = [torch.cat(self._sent)]
            self._works = [
                dist.all_to_all_single(whole, self._sent[0], lengths, sizes, group, async_op=True)
            ]

    def wait(self) -> list[Tensor]:
        """Return the message from each rank, uint8, once all of them have come and gone out."""
        for work in self._works:
            assert work is not None  # this rank is one of the group
            work.wait()
        self._works, self._sent = [], []
        return list(self._received)

    def _pairs(self, own: int, group: dist.ProcessGroup | None) -> list[dist.Work | None]:
        """Post each receive before anything is sent.

        gloo asks for a message on the connection on which it sends: a request would wait until
        this rank's message has gone out, and the link be used in one direction at a time.
        """
        peers = [rank for rank in range(dist.get_world_size(group)) if rank != own]
        works = [dist.irecv(self._received[rank], group=group, group_src=rank) for rank in peers]
        works += [dist.isend(self._sent[rank], group=group, group_dst=rank) for rank in peers]
        return works
