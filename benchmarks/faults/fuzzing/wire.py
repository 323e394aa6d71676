"""Define the fuzzed parsers of peers' data: frames, and their messages and records."""

import struct
import zlib
from functools import cache
from pathlib import Path
from string import ascii_letters
from typing import Any

import torch
from hypothesis import strategies as st

from fuzzing.changes import BYTES, FLIPS, JSON, Change, behind_one_byte
from fuzzing.parser import Parser
from paceline.core.errors import InvalidInput
from paceline.core.machine import DeviceKind
from paceline.core.plan import Kind, Lane, Resource
from paceline.core.timeline import Span
from paceline.core.wire_format import Purpose
from paceline.measure.device_profile import DeviceProfile
from paceline.record.worker_trace import MessageTime
from paceline.record.worker_trace import Trace as WheelTrace
from paceline.rpc import frames, tensor_parts
from paceline.rpc.frames import HEADER_NBYTES, Assembly, FrameHeader, Message, MessageKind
from paceline.strategies.wheel.answers import Gate as WheelGate
from paceline.strategies.wheel.staleness import LossSum, Workers
from paceline.strategies.wheel.tree import ChildProgress, ChildReport

_LARGEST = 2**22  # most bytes of a message in a run
_SIZE = struct.Struct("<I")
_KINDS = ascii_letters[:4]
_WORKER, _NUM_STEPS = 1, 5


def _frame_seeds(folder: Path) -> list[bytes]:
    """Return valid frames: a header each, and payloads of up to 4096 bytes."""
    parts = (bytes(range(200)), b"", b"x" * 3000)
    hello = FrameHeader(MessageKind.HELLO, 3)
    request = FrameHeader(MessageKind.REQUEST, 1, sequence=5, acknowledged=4)
    made = [
        (hello, Message("", parts=(b"run", b"layout", b"session"))),
        (request, Message("activations", 7, 6, parts)),
        (request, Message("gradients", 7, 6, (bytes(frames.PIECE_NBYTES + 100),))),
        (FrameHeader(MessageKind.HEARTBEAT), Message("")),
    ]
    found = []
    for header, message in made:
        for piece in frames.split(header, message):
            payload = bytes(piece.payload)[:4096]
            found.append(piece.frame + payload if len(piece.payload) <= 4096 else piece.frame)
    return found[:2] + found[-1:]


def _summed(fields: list[tuple[int, int, int]], own: Change) -> Change:
    """Change header fields and the payload, and update the checksums."""

    def change(data: bytes) -> bytes:
        header, payload = bytearray(data[:HEADER_NBYTES]), own(data[HEADER_NBYTES:])
        if len(header) < HEADER_NBYTES:
            return data
        for place, width, value in fields:
            header[place : place + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")
        del header[HEADER_NBYTES - 8 :]
        header += _SIZE.pack(zlib.crc32(payload))
        return bytes(header + _SIZE.pack(zlib.crc32(header))) + payload

    return change


_FIELDS = st.tuples(
    st.integers(4, HEADER_NBYTES - 9),
    st.sampled_from((1, 2, 4, 8)),
    st.sampled_from((0, 1, 255, 2**63, 2**64 - 1)) | st.integers(0, 2**64 - 1),
)
_SUMMED = st.builds(_summed, st.lists(_FIELDS, min_size=1, max_size=8), st.just(bytes) | BYTES)


def _frame(data: bytes, folder: Path) -> object:
    try:
        header = frames.unpack(data[:HEADER_NBYTES], data[HEADER_NBYTES:])
        if header.kind is MessageKind.HELLO:
            return frames.single_parts(header, data[HEADER_NBYTES:], 3)
        if header.total_nbytes > _LARGEST:
            raise InvalidInput("message", f"has {header.total_nbytes} bytes")  # as the hub does
        return header, Assembly().add(header, data[HEADER_NBYTES:])
    except frames.ProtocolError as error:  # server and client count it, and answer with RESET
        raise InvalidInput.of(str(error)) from None


@cache
def _wheel_gate() -> WheelGate:
    """Return the gate of a run whose worker has finished all steps."""
    workers = Workers(2, None)
    workers.of(_WORKER).next_step = _NUM_STEPS
    return WheelGate(workers, _NUM_STEPS, "{}", lambda: 7)


def _record_seeds(folder: Path) -> list[bytes]:
    """Return encoded records, each preceded by the letter of its kind."""
    span = Span(Kind.FORWARD, 3, "layer", 1, (Resource("cpu0", Lane.COMPUTE),), 0.1, 0.2, None, 8)
    texts = [
        WheelTrace([span], [MessageTime("labels", _WORKER, 2, 1.0)]).as_json().decode(),
        DeviceProfile(**_profiled(), below=(DeviceProfile(**_profiled()),)).model_dump_json(),
        ChildReport(
            nbytes={Purpose.LABELS: 8}, planned_nbytes={Purpose.LABELS: 8}, num_pushed=1
        ).model_dump_json(),
        ChildProgress(losses=[(2, LossSum(8, 1.5))], next_steps=(1, 2, 3)).model_dump_json(),
    ]
    return [kind.encode() + text.encode() for kind, text in zip(_KINDS, texts, strict=True)]


def _profiled() -> dict[str, Any]:
    return {
        "kind": DeviceKind.CPU,
        "host": "1",
        "seconds": ((Kind.FORWARD, "fc", 0.5),),
        "codecs": {},
        "link": {"latency_s": 0.0, "bytes_per_s": 1e8, "core_bytes_per_s": 1e8},
    }


def _record(data: bytes, folder: Path) -> object:
    number, text = _KINDS.index(data[:1].decode()), data[1:]
    message = Message("part", parts=(text,))
    match number:
        case 0:
            return _wheel_gate().done(_WORKER, message, is_child=False)
        case 1:
            return _wheel_gate().profile(message)
        case 3:
            return ChildProgress.read(memoryview(text), _NUM_STEPS, _NUM_STEPS)
    done = Message("done", _NUM_STEPS, parts=(WheelTrace().as_json(), text))
    return _wheel_gate().done(_WORKER, done, is_child=True)


def _part_seeds(folder: Path) -> list[bytes]:
    return [bytes(tensor_parts.buffers_of(torch.nn.BatchNorm1d(3)))]


def _part(data: bytes, folder: Path) -> object:
    half = torch.nn.BatchNorm1d(3)
    tensor_parts.load_buffers(half, memoryview(data))
    return half


PARSERS = (
    Parser("frame", 5, _frame_seeds, FLIPS | _SUMMED, _frame),
    Parser("record", 3, _record_seeds, JSON.map(behind_one_byte), _record),
    Parser("part", 1, _part_seeds, BYTES, _part),
)
