"""Run strategy tree: sum gradients in a binary tree (Le et al. 2018, section 2.3; BVLC/Caffe).

Rank 0 divides the sums by the number of ranks (T-3 in the paper's algorithm) and sends the means
down the tree. In the paper, rank 0 sends updated parameters instead (T-5). With means, every rank
can clip and scale gradients before its own update.
"""

import itertools
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.core.errors import InvalidInput
from paceline.core.plan import Kind
from paceline.exchange.compressed import Compression
from paceline.exchange.layout import Layout
from paceline.exchange.replica import Chunking, Exchange, Method, ModelReplica, Statistics
from paceline.exchange.replicas import start as start
from paceline.exchange.synchronized import Synchronized
from paceline.links.devices import device_of
from paceline.links.group import Group
from paceline.record.recorder import Role, noted
from paceline.strategies.tree.config import Tree
from paceline.strategies.tree.plan import children, parent


class FlatGradients:
    """A flat buffer of all gradients of one dtype.

    Its last values are counts: for each gradient, the number of ranks that changed the gradient.

    `as_views`: whether `copy_out` turns gradients into views of the buffer. `receives`: whether
    this rank has children in the tree, and so needs a second buffer for their gradients.
    """

    def __init__(
        self,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        as_views: bool,
        receives: bool,
    ) -> None:
        same = [slot for slot in layout.slots if slot.dtype == dtype]
        # Complex slots come first, because a complex view must begin at an even index of the
        # real-valued buffer.
        self._slots = sorted(same, key=lambda slot: not slot.parameter.is_complex())
        self._as_views = as_views
        sizes = [slot.num_values for slot in self._slots]
        buffer = torch.zeros(sum(sizes) + len(sizes), dtype=dtype, device=device)
        self.values, self.incoming = buffer, torch.empty_like(buffer[: None if receives else 0])
        self.sums, self._flags = buffer.split([sum(sizes), len(sizes)])
        self._parts = [
            flat.view(slot.parameter.dtype).as_strided(slot.parameter.size(), slot.stride)
            for slot, flat in zip(self._slots, self.sums.split(sizes), strict=True)
        ]

    def fill(self, touched: Sequence[bool]) -> None:
        """Copy this rank's gradients into the buffer."""
        for slot, part in zip(self._slots, self._parts, strict=True):
            gradient = slot.parameter.grad
            if gradient is None:
                # No gradient in this step: overwrite the previous step's mean in the buffer.
                part.zero_()
            elif gradient is not part:
                part.copy_(gradient)
        self._flags.copy_(torch.tensor([float(touched[slot.index]) for slot in self._slots]))

    def copy_out(self) -> list[int]:
        """Set gradients that any rank changed to their means; return their parameters' indices."""
        indices = []
        for slot, part, count in zip(self._slots, self._parts, self._flags.tolist(), strict=True):
            if not count:
                continue
            indices.append(slot.index)
            if self._as_views:
                slot.parameter.grad = part
            elif slot.parameter.grad is None:
                slot.parameter.grad = torch.empty_like(slot.parameter).copy_(part)
            else:
                slot.parameter.grad.copy_(part)
        return indices


_tags = itertools.count()  # each model has its own message tag, so that messages are not mixed up


class TreeExchange(Exchange):
    """One rank's exchange of gradients in the tree."""

    def __init__(self, group: Group, as_views: bool = False) -> None:
        self._group, self._as_views = group, as_views
        self._tag = next(_tags)
        self._parent = parent(group.rank)
        self._children = children(group.rank, group.world_size)
        self._num_steps = 0
        self._bytes_sent = self._bytes_received = 0
        self._exposed_s = 0.0
        self._flats: tuple[FlatGradients, ...] = ()

    def open(self, layout: Layout) -> None:
        """Allocate the buffers; raise InvalidInput if a GPU's process group lacks NCCL."""
        group, needs_nccl = self._group, device_of(self._group.device).backend == "nccl"
        config = dist.get_backend_config(group.process_group) if group.exchanges else "nccl"
        if needs_nccl and "nccl" not in config:
            problem = "'tree' cannot send a GPU's gradients with gloo"
            hint = "create the process group with NCCL, or choose exchange='host'"
            raise InvalidInput("exchange", problem, hint=hint)
        self._flats = tuple(
            FlatGradients(layout, dtype, self._group.device, self._as_views, bool(self._children))
            for dtype in dict.fromkeys(slot.dtype for slot in layout.slots)
        )

    @torch.no_grad()
    def finish(self, touched: Sequence[bool]) -> Sequence[bool]:
        """Sum gradients up the tree, send means down; return which gradients any rank changed."""
        started = time.monotonic()
        changed = [False] * len(touched)
        for flat in self._flats:
            flat.fill(touched)
            with self._group.naming_lost_ranks():
                self._reduce_and_broadcast(flat)
            for index in flat.copy_out():
                changed[index] = True
        self._num_steps += 1
        self._exposed_s += time.monotonic() - started
        return changed

    def _reduce_and_broadcast(self, flat: FlatGradients) -> None:
        own = self._group.rank
        # Add in a fixed order, so that sums are bitwise reproducible.
        for child in self._children:
            self._receive(flat.incoming, child, f"up{child}")
            with noted(self.recorder, Kind.REDUCE, f"{child}", Role.ALONE):
                flat.values += flat.incoming
        if self._parent is None:
            flat.sums /= self._group.world_size
        else:
            self._send(flat.values, self._parent, f"up{own}")
            self._receive(flat.values, self._parent, f"down{own}")
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

    def discard(self) -> None:
        """Raise InvalidInput: a step cannot be cancelled, as other ranks wait for its gradients."""
        problem = "cannot discard a step after a failed backward pass"
        hint = "end the run, or use exchange='host' on one machine"
        raise InvalidInput("exchange", problem, hint=hint)

    def statistics(self) -> Statistics:
        """Return the traffic and time so far; no time overlaps with the backward pass."""
        sent, received = self._bytes_sent, self._bytes_received
        return Statistics("tree", self._num_steps, sent, received, self._exposed_s, 0.0)

    def close(self) -> None:
        """Release the buffers."""
        self._flats = ()


def method(
    config: Tree, compression: Compression | None = None, chunk: Chunking | None = None
) -> Method:
    """Return the exchange method 'tree'; `compression` and `chunk` are ignored."""
    return Method("tree", TreeExchange, takes_codec=False)


def replica(module: nn.Module, config: Tree, group: Group) -> ModelReplica:
    """Wrap the module, so that its gradients are averaged over the group."""
    return Synchronized(module, method(config), group=group, gradient_as_bucket_view=True)
