"""Exchange messages between all pairs of ranks, in both directions at once."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class AllToAll:
    """Sends a message to every other rank, and receives a message from every other rank.

    Construction starts the transfers; all ranks must construct their objects in the same order.
    `sent[rank]`: the uint8 message to another rank. `nbytes[rank]`: the length of the message from
    that rank. The entries of this rank itself are ignored.
    """

    def __init__(
        self, sent: Sequence[Tensor], nbytes: Sequence[int], group: dist.ProcessGroup | None
    ) -> None:
        own, device = dist.get_rank(group), sent[0].device
        lengths = [0 if rank == own else length for rank, length in enumerate(nbytes)]
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        # Keep the tensors alive until they are sent, because PyTorch holds no reference to them.
        self._sent = [empty if rank == own else one for rank, one in enumerate(sent)]
        self.sent_nbytes = sum(map(len, self._sent))
        whole = torch.empty(sum(lengths), dtype=torch.uint8, device=device)
        self._received = whole.split(lengths)
        # gloo's all_to_all_single with unequal sizes sends and receives one after the other, so use
        # pairs of sends and receives on CPUs. NCCL's all_to_all_single is fast.
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
        """Wait until all messages are sent and received; return the message from each rank."""
        for work in self._works:
            assert work is not None  # None only on a rank outside the group
            work.wait()
        self._works, self._sent = [], []
        return list(self._received)


def post_pairs(
    received: Iterable[Tensor],
    sent: Iterable[Tensor],
    peers: Sequence[int],
    group: dist.ProcessGroup | None,
) -> list[dist.Work | None]:
    """Post a receive from each peer, and then a send to each peer.

    To receive a message, gloo first sends a request to the peer, over the connection that also
    carries sends. If a receive were posted after a send, the request would wait for the end of that
    send, and the link would carry only one direction at a time.
    """
    works = [
        dist.irecv(row, group=group, group_src=peer)
        for peer, row in zip(peers, received, strict=True)
    ]
    return works + [
        dist.isend(row, group=group, group_dst=peer) for peer, row in zip(peers, sent, strict=True)
    ]
