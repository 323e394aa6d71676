"""Convert tensors to message parts and back, with or without a codec; check received parts.

parameters or gradients  -- flatten -->  vector  -- part_of -->  part of a message
received part  -- values_of -->  vector  -- views -->  tensors of the original shapes
values on a device  -- Endpoint.message -->  message  -- Endpoint.values -->  values on a device
"""

import threading
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from paceline.codecs.codec import Payload
from paceline.codecs.names import find_codec
from paceline.core.errors import InvalidInput, NonFinite
from paceline.core.plan import Kind, Lane
from paceline.core.wire_format import Purpose
from paceline.links.devices import device_of
from paceline.record.worker_trace import WorkerRecorder
from paceline.rpc.frames import Message
from paceline.rpc.value_checks import check_buffers

Parts = tuple[memoryview, ...]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate the values of all tensors, each in row-major order, into a new vector."""
    if not tensors:  # the head (last layers) may be empty
        return torch.empty(0)
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def views(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """View a vector as tensors shaped as `like`; InvalidInput for another dtype or size."""
    sizes = [tensor.numel() for tensor in like]
    dtype = like[0].dtype if like else vector.dtype
    if vector.shape != (sum(sizes),) or vector.dtype != dtype:
        problem = f"must be {sum(sizes):,} values of {dtype}: hub and worker need the same model"
        raise InvalidInput("parameters", problem, got=f"{list(vector.shape)} of {vector.dtype}")
    return [part.view(one.shape) for part, one in zip(vector.split(sizes), like, strict=True)]


@torch.no_grad()
def load_vector(parameters: Sequence[nn.Parameter], vector: Tensor) -> None:
    """Copy the values of a vector into the parameters; InvalidInput if they do not fit."""
    for parameter, values in zip(parameters, views(vector, parameters), strict=True):
        parameter.copy_(values)


def buffers_of(half: nn.Module) -> memoryview:
    """Concatenate the bytes of all buffers of a module, such as running means."""
    return memoryview(b"".join(part_of(buffer.detach().cpu()) for buffer in half.buffers()))


@torch.no_grad()
def load_buffers(half: nn.Module, part: memoryview) -> None:
    """Check bytes that `buffers_of` has made, and copy their values into a module's buffers."""
    buffers = list(half.buffers())
    sizes = [buffer.nbytes for buffer in buffers]
    values = values_of(part, torch.uint8, sum(sizes))
    # Clone, because viewing as another type requires alignment.
    found = [
        own.clone().view(buffer.dtype).view(buffer.shape)
        for buffer, own in zip(buffers, values.split(sizes), strict=True)
    ]
    check_buffers(found, buffers)
    for buffer, own in zip(buffers, found, strict=True):
        buffer.copy_(own)


def parts_of(message: Message, *counts: int) -> Parts:
    """Return a received message's parts; InvalidInput if their number is not one of `counts`."""
    if counts and len(message.parts) not in counts:
        problem = f"must have {' or '.join(map(str, counts))} parts"
        raise InvalidInput(message.topic, problem, got=len(message.parts))
    return tuple(memoryview(part) for part in message.parts)


def part_of(tensor: Tensor) -> memoryview:
    """View the memory of a contiguous CPU tensor as bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def values_of(part: memoryview, dtype: torch.dtype, count: int) -> Tensor:
    """View a part as `count` values of `dtype`; InvalidInput if its size differs."""
    if part.nbytes != count * dtype.itemsize:
        problem = f"must be {count:,} values of {dtype}, {count * dtype.itemsize:,} bytes"
        raise InvalidInput("parameters", problem, got=part.nbytes)
    if not count:
        return torch.empty(0, dtype=dtype)
    whole = bytearray(part) if part.readonly else part  # torch warns about read-only memory
    return torch.frombuffer(whole, dtype=dtype)


class CopyLane:
    """A device, its stream for received values, and a lock that serializes copies."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.lock = device_of(device), threading.Lock()
        self.stream = self.device.new_stream() if self.device.is_asynchronous else None


class Endpoint:
    """Encodes and decodes one worker's messages, in the worker's process or at the hub.

    Each endpoint has separate codecs, because a codec with error feedback keeps the encoding error
    of its last values.
    """

    def __init__(
        self,
        codecs: Mapping[Purpose, str],
        dtype: torch.dtype,
        recorder: WorkerRecorder,
        copies: CopyLane,
    ) -> None:
        self._codecs = {purpose: find_codec(name) for purpose, name in codecs.items()}
        self._dtype, self.recorder, self._copies = dtype, recorder, copies

    def message(
        self, purpose: Purpose, step: int, version: int, values: Tensor, before: Parts = ()
    ) -> Message:
        """Encode values as a message whose first parts are `before`.

        Raises NonFinite if a codec cannot encode a value that is NaN or infinite.
        """
        codec, values = self._codecs.get(purpose), values.detach()
        if codec is None:
            buffers: tuple[Tensor, ...] = (values.contiguous().reshape(-1).view(torch.uint8),)
        else:
            with self.recorder.work(step, Kind.ENCODE, purpose):
                payload = codec.encode(values)
            if payload.num_nonfinite:
                raise NonFinite(
                    f"{purpose}: {payload.num_nonfinite:,} of {payload.count:,} values are NaN or "
                    f"infinite, which codec {codec.name} cannot encode; lower learning_rate"
                )
            buffers = payload.buffers
        if self._copies.stream is not None:
            with self.recorder.work(step, Kind.D2H, purpose, Lane.D2H):
                buffers = tuple(buffer.cpu() for buffer in buffers)
        parts = (*before, *(part_of(buffer.contiguous()) for buffer in buffers))
        self.recorder.sends(step, purpose)
        return Message(purpose.value, step, version, parts)

    def values(self, purpose: Purpose, message: Message, at_s: float, count: int) -> Tensor:
        """Decode the `count` values of a message that arrived at time `at_s`."""
        self.recorder.received(message.step, purpose, at_s)
        buffers = self.to_device(message.step, purpose, parts_of(message))
        return self.decode(message.step, purpose, buffers, count)

    def to_device(self, step: int, purpose: Purpose, parts: Parts) -> tuple[Tensor, ...]:
        """Copy received parts to the device, still encoded."""
        buffers = tuple(values_of(part, torch.uint8, part.nbytes) for part in parts)
        device, stream = self._copies.device, self._copies.stream
        if stream is None:
            return buffers
        with (
            self._copies.lock,  # one copy at a time
            device.use(stream),
            self.recorder.work(step, Kind.H2D, purpose, Lane.H2D),
        ):
            # A synchronous copy: received memory is not pinned.
            moved = tuple(buffer.to(device.torch_device) for buffer in buffers)
        for buffer in moved:
            device.keep(buffer)  # keeps its memory until the current stream has decoded it
        return moved

    def decode(self, step: int, purpose: Purpose, buffers: Sequence[Tensor], count: int) -> Tensor:
        """Decode `count` values from received parts; InvalidInput for a wrong size."""
        codec = self._codecs.get(purpose)
        if codec is not None:
            with self.recorder.work(step, Kind.DECODE, purpose):
                return codec.decode(Payload(codec.name, count, tuple(buffers)))
        found, nbytes = sum(buffer.numel() for buffer in buffers), count * self._dtype.itemsize
        if len(buffers) != 1 or found != nbytes:
            problem = f"must be {nbytes:,} bytes in one part, {count:,} values of {self._dtype}"
            raise InvalidInput(purpose, problem, got=f"{found:,} bytes in {len(buffers)} parts")
        return buffers[0].view(self._dtype)
