"""Values of a step as messages: encoded, copied to and from the device, and recorded.

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
    """The copies to one device, of all workers there: one at a time, on a stream of their own.

    So the device goes on computing meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.turn = device_of(device), threading.Lock()
        self.stream = self.device.new_stream() if self.device.is_asynchronous else None


class Endpoint:
    """One worker's end of the exchange: encodes, copies to and from the device, and records.

    There is one in the worker's process and one at the hub, with codecs of its own, since a codec
    may remember the values it has lost. `codecs` are named by purpose; `copies` are to its device.
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
        """Return the message about values of any shape, which is sent at once.

        `before` are parts in front of them. Raises NonFinite if a codec cannot carry a value.
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
                    f"infinite, which codec {codec.name} cannot carry; choose a smaller "
                    "learning_rate"
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
        """Return the `count` values of a message that came at `at_s`, maybe in its memory.

        Raises InvalidInput if they do not fit.
        """
        self.recorder.received(message.step, purpose, at_s)
        buffers = self.to_device(message.step, purpose, parts_of(message))
        return self.decode(message.step, purpose, message.codec, buffers, count)

    def to_device(self, step: int, purpose: Purpose, parts: Parts) -> tuple[Tensor, ...]:
        """Return parts that have come, on the device, still encoded."""
        buffers = tuple(values_of(part, torch.uint8, part.nbytes) for part in parts)
        device, stream = self._copies.device, self._copies.stream
        if stream is None:
            return buffers
        with (
            self._copies.turn,
            device.use(stream),
            self.recorder.work(step, Kind.H2D, purpose, Lane.H2D),
        ):
            # It waits for each: what has come lies in memory that is not pinned.
            moved = tuple(buffer.to(device.torch_device) for buffer in buffers)
        for buffer in moved:
            device.current_stream().keep(buffer)  # by which they are decoded
        return moved

    def decode(
        self, step: int, purpose: Purpose, codec: str, buffers: Sequence[Tensor], count: int
    ) -> Tensor:
        """Return the `count` values of parts on the device, maybe in their memory.

        Raises InvalidInput if the bytes are fewer or more, or made by another codec.
        """
        own = self._codecs.get(purpose)
        name = "" if own is None else own.name
        if codec != name:
            raise InvalidInput(
                purpose, f"came by codec {codec or 'none'!r}, and not by {name or 'none'!r}"
            )
        if own is not None:
            with self.recorder.work(step, Kind.DECODE, purpose):
                return own.decode(Payload(name, count, tuple(buffers)))
        found = sum(buffer.numel() for buffer in buffers)
        if len(buffers) != 1 or found != count * self._dtype.itemsize:
            raise InvalidInput(
                purpose,
                f"{found:,} bytes in {len(buffers)} parts",
                hint=(
                    f"{count:,} values of {self._dtype} are {count * self._dtype.itemsize:,} in one"
                ),
            )
        return buffers[0].view(self._dtype)
