"""The typical data parallel training of Le et al. 2018, section 2.3, as BVLC/Caffe does it.

After backward the gradients go up a binary tree to rank 0 (step T-3), which makes them the mean.
The means come down the same tree, where the paper's rank 0 sends the parameters that it alone has
updated (T-5): as many bytes at the same place, but every rank has gradients to clip, to scale and
to update its own parameters by, as with DistributedDataParallel. All messages are point to point.
"""

import itertools
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.core.errors import InvalidInput
from paceline.core.plan import Kind
from paceline.exchange.layout import Chunk, Layout
from paceline.exchange.replica import Statistics
from paceline.links.group import Group
from paceline.record.recorder import Recorder, noted
from paceline.strategies.tree.flat import Flat
from paceline.strategies.tree.plan import children, parent
from paceline.tune.chunk import ChunkTimes

_tags = itertools.count()  # so that messages of one model cannot be taken for another's


class TreeExchange:
    """One rank's side: gradients up, means down.

    With `as_views` gradients are views of the buffer that travels, which saves a copy.
    """

    name = "tree"
    chunked = False

    def __init__(self, group: Group, as_views: bool = False) -> None:
        self.recorder: Recorder | None = None
        self._group, self._as_views = group, as_views
        self._tag = next(_tags)
        self._parent = parent(group.rank)
        self._children = children(group.rank, group.world_size)
        self._num_steps = 0
        self._bytes_sent = self._bytes_received = 0
        self._exposed_s = 0.0
        self._flats: tuple[Flat, ...] = ()

    def open(self, layout: Layout) -> None:
        """Make a flat buffer for the gradients of each type, and one for those of a child."""
        dtypes = dict.fromkeys(slot.dtype for slot in layout.slots)
        device = self._group.device
        self._flats = tuple(Flat(layout, dtype, device, self._as_views) for dtype in dtypes)

    def arrange(self, layout: Layout, chunks: Sequence[Chunk]) -> None:
        """Everything goes together, in the order that all ranks had from the beginning."""

    def begin(self) -> None:
        """Nothing goes on during backward."""

    def ready(self, chunk: Chunk, touched: Sequence[bool]) -> None:
        """Nothing is sent before all gradients are there."""

    @torch.no_grad()
    def finish(self, touched: Sequence[bool]) -> Sequence[bool]:
        """Bring the gradients to rank 0, and their means to all."""
        started = time.monotonic()
        changed = [False] * len(touched)
        for flat in self._flats:
            flat.fill(touched)
            with self._group.naming_the_lost():
                self._up(flat)
                if self._parent is None:
                    flat.divide(self._group.world_size)
                self._down(flat)
            for index in flat.hand_out():
                changed[index] = True
        self._num_steps += 1
        self._exposed_s += time.monotonic() - started
        return changed

    def _up(self, flat: Flat) -> None:
        for child in self._children:
            self._receive(flat.incoming, child, f"up{child}")
            with noted(self.recorder, Kind.REDUCE, f"{child}", alone=True):
                flat.values += flat.incoming
        if self._parent is not None:
            self._send(flat.values, self._parent, f"up{self._group.rank}")

    def _down(self, flat: Flat) -> None:
        if self._parent is not None:
            self._receive(flat.values, self._parent, f"down{self._group.rank}")
        for child in reversed(self._children):
            self._send(flat.values, child, f"down{child}")

    def _send(self, values: Tensor, rank: int, part: str) -> None:
        with noted(self.recorder, Kind.SEND, part):
            dist.send(values, group=self._group.process_group, group_dst=rank, tag=self._tag)
        self._bytes_sent += values.nbytes

    def _receive(self, values: Tensor, rank: int, part: str) -> None:
        with noted(self.recorder, Kind.SEND, part):
            dist.recv(values, group=self._group.process_group, group_src=rank, tag=self._tag)
        self._bytes_received += values.nbytes

    def times(self) -> Sequence[ChunkTimes]:
        """There are no chunks."""
        return ()

    def discard(self) -> None:
        """Refuse to go on: the others wait for gradients that will not come."""
        raise InvalidInput(
            "exchange: a backward pass failed on this rank, and tree cannot take a step back; "
            "use host, or end the run"
        )

    def statistics(self) -> Statistics:
        """Return what it has taken so far: nothing is hidden."""
        sent, received = self._bytes_sent, self._bytes_received
        return Statistics(self.name, self._num_steps, sent, received, self._exposed_s, 0.0)

    def close(self) -> None:
        """Let go of the buffers."""
        self._flats = ()
