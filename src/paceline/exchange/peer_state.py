"""Copy a worker's state, and send the copy to a peer that joins.

torchft's transports unpickle data from peers. `PeerTransport` receives only JSON and tensors. The
messages use the quorum's process group, so no port is opened:

length     int64                   length of the header
header     JSON                    the plain values; the names, dtypes and shapes of the tensors
tensors    bytes                   one message for each tensor
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoints.json_values import Json, dumps, loads
from paceline.checkpoints.nested import apart, together
from paceline.checkpoints.state import load_optimizer_state, optimizer_state
from paceline.checkpoints.tensor_file import Tensors, check_can_be_saved
from paceline.core.errors import InvalidInput
from paceline.links.tensor_messages import bytes_of, empty_of, spec_of

_MAX_HEADER_NBYTES = 1 << 28


@dataclass(frozen=True)
class InnerState:
    """A copy of a worker's buffers and optimizer states, in host memory."""

    optimizers: list[dict[str, Json]]
    buffers: list[Tensor]
    num_steps: int

    @classmethod
    def of(cls, model: nn.Module, optimizers: Sequence[Optimizer], num_steps: int) -> Self:
        """Copy the state; InvalidInput for an optimizer state that cannot be sent."""
        copies = []
        for one in optimizers:
            tensors, values = optimizer_state(one, model.named_parameters())
            copied = {name: _copied(tensor) for name, tensor in tensors.items()}
            copies.append({"tensors": copied, "values": values})
        return cls(copies, [_copied(one) for one in model.buffers()], num_steps)

    def load_into(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Load the saved states into `optimizers`; InvalidInput for a state that does not fit."""
        for one, state in zip(optimizers, self.optimizers, strict=True):
            load_optimizer_state(one, model.named_parameters(), **state)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


class PeerTransport:
    """A torchft CheckpointTransport for states of nested dicts and lists.

    `group()` returns the current quorum's process group, whose timeout applies to each tensor.
    """

    def __init__(self, group: Callable[[], Any]) -> None:
        self._group = group

    def metadata(self) -> str:
        """Return an empty text, because `recv_checkpoint` needs only the sender's rank."""
        return ""

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: Json, timeout: timedelta
    ) -> None:
        """Send a state to each of the ranks, one after another."""
        del step, timeout
        values, found = apart(state_dict)
        tensors = {name: one.detach().to("cpu").contiguous() for name, one in found.items()}
        for name, one in tensors.items():
            check_can_be_saved(name, one)
        text = bytearray(dumps("state", (values, spec_of(tensors))))
        header = torch.frombuffer(text, dtype=torch.uint8)
        for rank in dst_ranks:
            self._send(torch.tensor([len(header)]), rank)
            self._send(header, rank)
            for tensor in tensors.values():
                self._send(bytes_of(tensor), rank)

    def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: timedelta
    ) -> dict[str, Any]:
        """Receive a state from a rank; InvalidInput if it is malformed."""
        del metadata, step, timeout
        length = int(self._received(torch.empty(1, dtype=torch.int64), src_rank))
        if not 0 < length <= _MAX_HEADER_NBYTES:
            problem = f"has a malformed header from worker {src_rank}"
            raise InvalidInput("state", problem, got=length)
        header = self._received(torch.empty(length, dtype=torch.uint8), src_rank)
        tensors: Tensors = {}
        try:
            values, rows = loads(header.numpy().tobytes())
            for name, dtype, shape in rows:
                tensors[name] = empty_of(dtype, shape)
                self._received(bytes_of(tensors[name]), src_rank)
            state: dict[str, Any] = together(values, tensors)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise InvalidInput("state", f"is malformed (from worker {src_rank}): {error}") from None
        return state

    def disallow_checkpoint(self) -> None:
        """Do nothing, because a state is copied before it is sent."""

    def shutdown(self, wait: bool = True) -> None:
        """Do nothing, because the manager owns the process group."""

    def _send(self, tensor: Tensor, rank: int) -> None:
        if tensor.numel():
            work = dist.isend(tensor, group=self._group(), group_dst=rank)
            assert work is not None
            work.wait()

    def _received(self, tensor: Tensor, rank: int) -> Tensor:
        if tensor.numel():
            work = dist.irecv(tensor, group=self._group(), group_src=rank)
            assert work is not None
            work.wait()
        return tensor
