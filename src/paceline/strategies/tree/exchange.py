"""The typical data parallel training of Le et al. 2018, section 2.3, as BVLC/Caffe does it.

After backward the gradients go up a binary tree to rank 0, whose optimizer alone updates the
parameters; they come down the same tree. All messages are point to point.
"""

import itertools
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.core.errors import InvalidInput
from paceline.core.plan import Kind
from paceline.exchange.layout import Chunk, Layout, Slot
from paceline.exchange.optimizers import after_steps
from paceline.exchange.replica import Statistics
from paceline.links.group import Group
from paceline.record.recorder import Recorder, noted
from paceline.strategies.tree.flat import Flat
from paceline.strategies.tree.plan import children, parent

_tags = itertools.count()  # so that messages of one model cannot be taken for another's


class TreeExchange:
    """One rank's side: gradients up (step T-3), parameters down (T-5).

    Rank 0 gets the mean gradients, the others none, so that their optimizers change nothing.
    Parameters come down right after the step of a torch optimizer, and else before the next
    forward pass.
    """

    name = "tree"
    chunked = False

    def __init__(self, group: Group) -> None:
        self.recorder: Recorder | None = None
        self._group = group
        self._tag = next(_tags)
        self._parent = parent(group.rank)
        self._children = children(group.rank, group.world_size)
        self._num_steps = 0
        self._bytes_sent = self._bytes_received = 0
        self._exposed_s = 0.0
        self._stale: dict[int, Slot] = {}  # updated on rank 0, not yet on the others
        self._before: dict[int, Tensor] = {}
        self._layout = Layout((), 0)
        self._flats: tuple[Flat, ...] = ()
        self._hook = after_steps(self._stepped)

    def open(self, layout: Layout) -> None:
        """Make a flat buffer for the gradients of each type, and one for those of a child."""
        self._layout = layout
        dtypes = dict.fromkeys(slot.parameter.dtype for slot in layout.slots)
        self._flats = tuple(Flat(layout, dtype, self._group.device) for dtype in dtypes)

    def set_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Everything goes together."""

    def before_forward(self) -> None:
        """Send down the parameters of an optimizer that did not say when it stepped."""
        device = self._group.device.type
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16:
            raise InvalidInput(
                "exchange: tree does not go with float16 autocast, because only rank 0 has the "
                "gradients that a GradScaler checks; use host or allreduce, or bfloat16"
            )
        self._down(tuple(self._stale.values()))

    def before_backward(self, touched: Sequence[bool]) -> None:
        """Put aside the means of earlier exchanges: of all ranks, only rank 0 has them."""
        for slot in self._layout.slots:
            gradient = slot.parameter.grad
            if gradient is not None and not touched[slot.index]:
                self._before[slot.index] = gradient.clone()
                slot.parameter.grad = None

    def begin(self) -> None:
        """Nothing goes on during backward."""

    def ready(self, chunk: Chunk, touched: Sequence[bool]) -> None:
        """Nothing is sent before all gradients are there."""

    @torch.no_grad()
    def finish(self, touched: Sequence[bool]) -> None:
        """Bring the mean of all gradients to rank 0; the other ranks then have none."""
        started = time.monotonic()
        for flat in self._flats:
            flat.fill(touched)
            self._up(flat)
            flat.hand_out(self._group.world_size if self._group.rank == 0 else None)
        if self._group.rank == 0:
            self._restore()
        elif self.recorder is not None:
            self.recorder.leave_out(Kind.STEP)
        self._stale = {slot.index: slot for slot in self._layout.slots}
        self._num_steps += 1
        self._exposed_s += time.monotonic() - started

    def _up(self, flat: Flat) -> None:
        for child in self._children:
            with noted(self.recorder, Kind.SEND, f"up{child}"):
                dist.recv(flat.incoming, child, tag=self._tag)
            self._bytes_received += flat.nbytes
            with noted(self.recorder, Kind.REDUCE, f"{child}", alone=True):
                flat.values += flat.incoming
        if self._parent is not None:
            with noted(self.recorder, Kind.SEND, f"up{self._group.rank}"):
                dist.send(flat.values, self._parent, tag=self._tag)
            self._bytes_sent += flat.nbytes

    def _restore(self) -> None:
        for slot in self._layout.slots:
            before = self._before.get(slot.index)
            if before is not None:
                mean = slot.parameter.grad
                slot.parameter.grad = before if mean is None else before + mean
        self._before = {}

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if self._stale:
            updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
            self._down(tuple(s for s in self._stale.values() if id(s.parameter) in updated))

    @torch.no_grad()
    def _down(self, slots: Sequence[Slot]) -> None:
        """Send the parameters of these slots from rank 0 to all."""
        if not slots:
            return
        started = time.monotonic()
        for flat in self._flats:
            for part in flat.parameters(slots, fill=self._group.rank == 0):
                self._send_down(part)
            flat.take_over(slots)
        for slot in slots:
            del self._stale[slot.index]
        self._exposed_s += time.monotonic() - started

    def _send_down(self, part: Tensor) -> None:
        if self._parent is not None:
            with noted(self.recorder, Kind.SEND, f"down{self._group.rank}"):
                dist.recv(part, self._parent, tag=self._tag)
            self._bytes_received += part.nbytes
        for child in reversed(self._children):
            with noted(self.recorder, Kind.SEND, f"down{child}"):
                dist.send(part, child, tag=self._tag)
            self._bytes_sent += part.nbytes

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
        """Let go of the optimizers."""
        self._hook.remove()
