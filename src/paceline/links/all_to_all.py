"""Messages between all pairs of ranks, in both directions at once."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Posted:
    """A message to each other rank of a group and one from each, sent since construction.

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
        # Keep the tensors alive until they have been sent: torch holds no reference.
        self._sent = [empty if rank == own else one for rank, one in enumerate(sent)]
        self.sent_nbytes, self.received_nbytes = sum(map(len, self._sent)), sum(lengths)
        whole = torch.empty(sum(lengths), dtype=torch.uint8, device=device)
        self._received = whole.split(lengths)
        # NCCL has a fast all-to-all of unequal sizes; gloo's own serialises both directions.
        if device.type == "cpu":
            peers = [rank for rank in range(len(self._sent)) if rank != own]
            received = [self._received[peer] for peer in peers]
            self._works = post_pairs(received, [self._sent[peer] for peer in peers], peers, group)
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


def post_pairs(
    received: Iterable[Tensor],
    sent: Iterable[Tensor],
    peers: Sequence[int],
    group: dist.ProcessGroup | None,
) -> list[dist.Work | None]:
    """Post a receive from each peer, and then a send to each.

    gloo requests a message on the connection on which it sends: a request that follows a send would
    wait for it, and the link would be used in one direction at a time.
    """
    works = [
        dist.irecv(row, group=group, group_src=peer)
        for peer, row in zip(peers, received, strict=True)
    ]
    works += [
        dist.isend(row, group=group, group_dst=peer) for peer, row in zip(peers, sent, strict=True)
    ]
    return works
