"""Encode tensors as messages, and decode received messages on the device.

values  -- Endpoint.message -->  parts of a message  -- Endpoint.values -->  values
"""

import threading
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.codecs.codec import Payload
from paceline.codecs.names import find_codec
from paceline.core.errors import InvalidInput, NonFinite
from paceline.core.plan import Kind, Lane
from paceline.core.wire_format import Purpose
from paceline.links.devices import device_of
from paceline.record.worker_trace import WorkerRecorder
from paceline.rpc.frames import Message
from paceline.rpc.tensor_parts import Parts, part_of, parts_of, values_of


class CopyLane:
    """Copies received values to one device, one at a time, on a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.turn = device_of(device), threading.Lock()
        self.stream = self.device.new_stream() if self.device.is_asynchronous else None


class Endpoint:
    """Encodes and decodes one worker's messages, in the worker's process or at the hub.

    Endpoints share no codecs, because a codec may keep the encoding error of the last values.
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
        """Encode values as a message, after the parts `before`; NonFinite if the codec cannot."""
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
        name = "" if codec is None else codec.name
        return Message(purpose.value, step, version, name, parts)

    def values(self, purpose: Purpose, message: Message, at_s: float, count: int) -> Tensor:
        """Decode the `count` values of a message that arrived at time `at_s`."""
        self.recorder.received(message.step, purpose, at_s)
        buffers = self.to_device(message.step, purpose, parts_of(message))
        return self.decode(message.step, purpose, message.codec, buffers, count)

    def to_device(self, step: int, purpose: Purpose, parts: Parts) -> tuple[Tensor, ...]:
        """Copy received parts to the device, still encoded."""
        buffers = tuple(values_of(part, torch.uint8, part.nbytes) for part in parts)
        device, stream = self._copies.device, self._copies.stream
        if stream is None:
            return buffers
        with (
            self._copies.turn,
            device.use(stream),
            self.recorder.work(step, Kind.H2D, purpose, Lane.H2D),
        ):
            # A synchronous copy: received memory is not pinned.
            moved = tuple(buffer.to(device.torch_device) for buffer in buffers)
        for buffer in moved:
            device.current_stream().keep(buffer)  # until this stream has decoded the buffer
        return moved

    def decode(
        self, step: int, purpose: Purpose, codec: str, buffers: Sequence[Tensor], count: int
    ) -> Tensor:
        """Decode `count` values from received parts on the device.

        Raises InvalidInput if the endpoint has another codec, or if the number of bytes is wrong.
        """
        own = self._codecs.get(purpose)
        name = "" if own is None else own.name
        if codec != name:
            problem = f"must be encoded by codec {name or 'none'!r}"
            raise InvalidInput(purpose, problem, got=codec or "none")
        if own is not None:
            with self.recorder.work(step, Kind.DECODE, purpose):
                return own.decode(Payload(name, count, tuple(buffers)))
        found, nbytes = sum(buffer.numel() for buffer in buffers), count * self._dtype.itemsize
        if len(buffers) != 1 or found != nbytes:
            problem = f"must be {nbytes:,} bytes in one part, {count:,} values of {self._dtype}"
            raise InvalidInput(purpose, problem, got=f"{found:,} bytes in {len(buffers)} parts")
        return buffers[0].view(self._dtype)
