"""Send a worker's state to others over the quorum's process group.

torchft's transports unpickle data from peers. This one opens no port, and receives only JSON and
tensors:

length     int64                   of the header
header     JSON                    the values, and of each tensor its name, type and shape
tensors    bytes, one by one
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.checkpoints.json_values import Json, dumps, loads
from paceline.checkpoints.nested import apart, together
from paceline.checkpoints.tensor_file import Tensors, check_can_be_saved
from paceline.core.errors import InvalidInput
from paceline.links.tensor_messages import bytes_of, empty_of, spec_of

_MAX_HEADER_NBYTES = 1 << 28


class PeerTransport:
    """torchft CheckpointTransport for states of nested dicts and lists.

    `group()` returns the current quorum's process group; its timeout applies to each tensor.
    """

    def __init__(self, group: Callable[[], Any]) -> None:
        self._group = group

    def metadata(self) -> str:
        """Return "", because peers use ranks."""
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
            raise InvalidInput("state", f"worker {src_rank} sends a header of {length:,} bytes")
        header = self._received(torch.empty(length, dtype=torch.uint8), src_rank)
        tensors: Tensors = {}
        try:
            values, rows = loads(header.numpy().tobytes())
            for name, dtype, shape in rows:
                tensors[name] = empty_of(dtype, shape)
                self._received(bytes_of(tensors[name]), src_rank)
            state: dict[str, Any] = together(values, tensors)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise InvalidInput("state", f"worker {src_rank} sends none: {error}") from None
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
