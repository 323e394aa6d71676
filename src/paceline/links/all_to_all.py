"""Exchange messages between all pairs of ranks, in both directions at once."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class AllToAll:
    """Sends a message to each other rank and receives one from each, starting at construction.

    `sent` has the uint8 message for each rank, `nbytes` the length of each received message; this
    rank's own entries are ignored. All ranks must construct them in the same order.
    """

    def __init__(
        self, sent: Sequence[Tensor], nbytes: Sequence[int], group: dist.ProcessGroup | None
    ) -> None:
        own, device = dist.get_rank(group), sent[0].device
        lengths = [0 if rank == own else length for rank, length in enumerate(nbytes)]
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        # Keep the tensors alive until they are sent: torch holds no reference.
        self._sent = [empty if rank == own else one for rank, one in enumerate(sent)]
        self.sent_nbytes, self.received_nbytes = sum(map(len, self._sent)), sum(lengths)
        whole = torch.empty(sum(lengths), dtype=torch.uint8, device=device)
        self._received = whole.split(lengths)
        # gloo's all-to-all of unequal sizes serialises both directions; NCCL's is fast.
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
        """Return the uint8 message from each rank once all messages are sent and received."""
        for work in self._works:
            assert work is not None  # this rank belongs to the group
            work.wait()
        self._works, self._sent = [], []
        return list(self._received)


def post_pairs(
    received: Iterable[Tensor],
    sent: Iterable[Tensor],
    peers: Sequence[int],
    group: dist.ProcessGroup | None,
) -> list[dist.Work | None]:
    """Post a receive from each peer, and only then a send to each.

    gloo requests a message over the connection that carries sends: a request posted after a send
    would wait for it, and the link would carry one direction at a time.
    """
    works = [
        dist.irecv(row, group=group, group_src=peer)
        for peer, row in zip(peers, received, strict=True)
    ]
    works += [
        dist.isend(row, group=group, group_dst=peer) for peer, row in zip(peers, sent, strict=True)
    ]
    return works
