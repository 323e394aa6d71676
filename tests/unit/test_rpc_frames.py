"""Frames and messages: a message arrives unchanged, or the change is detected."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.rpc.frames import (
    HEADER_NBYTES,
    PIECE_NBYTES,
    Assembly,
    FrameHeader,
    Message,
    MessageKind,
    MessagePiece,
    ProtocolError,
    VersionMismatch,
    pack,
    split,
    unpack,
)
from refusals import refused

NAMES = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=24)
INT64 = st.integers(-(2**63), 2**63 - 1)
UINT64 = st.integers(0, 2**64 - 1)
PART_NBYTES = st.one_of(
    st.integers(0, 100),
    st.sampled_from([PIECE_NBYTES - 1, PIECE_NBYTES, PIECE_NBYTES + 1, 3 * PIECE_NBYTES - 5]),
)


OWN = ("worker", "sequence", "acknowledged")


def received(sent: list[MessagePiece]) -> Message | None:
    """Put pieces together as a receiver does."""
    assembly = Assembly()
    *before, last = [assembly.add(unpack(*piece), piece.payload) for piece in sent]
    assert not any(before)
    return last


@given(
    topic=NAMES,
    step=INT64,
    version=INT64,
    sequence=UINT64,
    sizes=st.lists(PART_NBYTES, max_size=8),
    seed=st.integers(0, 2**32),
)
def test_a_message_arrives_as_it_was_sent(topic, step, version, sequence, sizes, seed):
    source = random.Random(seed)
    parts = [source.randbytes(nbytes) for nbytes in sizes]
    message = Message(topic, step, version, tuple(map(memoryview, parts)))
    header = FrameHeader(MessageKind.REQUEST, 2**32 - 1, sequence, 2**64 - 1)
    sent = list(split(header, message))
    assert all(len(piece.frame) == HEADER_NBYTES for piece in sent)
    nbytes = [memoryview(piece.payload).nbytes for piece in sent]
    assert max(nbytes) <= PIECE_NBYTES
    assert [unpack(*piece).offset for piece in sent] == [*accumulate([0, *nbytes[:-1]])]
    assert sum(nbytes) == sum(sizes)
    first = unpack(*sent[0])
    assert [getattr(first, name) for name in OWN] == [getattr(header, name) for name in OWN]
    came = received(sent)
    # Trailing zeros of a fixed-size field are padding: a name cannot end with them.
    assert came == replace(message, parts=came.parts)
    assert [bytes(part) for part in came.parts] == parts


def test_arrays_are_sent_without_a_copy_and_received_aligned():
    array = np.arange(200_000, dtype=np.float64)
    odd = b"123"
    sent = list(split(FrameHeader(MessageKind.REPLY), Message("a", parts=(odd, array.data))))
    assert np.shares_memory(np.frombuffer(sent[1].payload, np.uint8), array)
    came = received(sent)
    assert came is not None
    values = np.frombuffer(came.parts[1], np.float64)
    assert values.flags.aligned
    assert values.flags.writeable
    np.testing.assert_array_equal(values, array)


def test_every_corrupted_or_missing_byte_is_detected():
    payload = random.Random(1).randbytes(300)
    header = FrameHeader(MessageKind.REQUEST, 3, 4, 5, 6, 7, "topic", (100, 200))
    frame = pack(header, payload)
    assert unpack(frame, payload) == header

    def changed(content: bytes) -> Iterator[bytes]:
        for at in range(len(content)):
            for flip in (1, 2, 4, 8, 16, 32, 64, 128, 255):
                yield content[:at] + bytes([content[at] ^ flip]) + content[at + 1 :]
            yield content[:at]
        yield content + b"x"

    spoilt = [(one, payload) for one in changed(frame)] + [(frame, one) for one in changed(payload)]
    for wrong in spoilt:
        with pytest.raises(ProtocolError):
            unpack(*wrong)


def test_another_version_is_recognized_by_its_first_bytes():
    with pytest.raises(VersionMismatch) as caught:
        unpack(b"PCLW\x09\x03 a header of the future", b"and what it says")
    assert caught.value.kind == MessageKind.REFUSED
    assert "version 9" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "nbytes"),
    [
        ({"sizes": (1 << 40, 1)}, 1),
        ({"sizes": (10,), "offset": 8}, 3),
        ({"sizes": (10,), "offset": 2**64 - 1}, 3),
        ({"sizes": (PIECE_NBYTES + 1,)}, PIECE_NBYTES + 1),
        ({"sizes": (10,)}, 0),
        ({"sizes": ()}, 1),
        ({"topic": "a\0b"}, 0),
        ({"topic": "\x1b[2J"}, 0),
    ],
)
def test_headers_that_contradict_themselves_are_refused(change, nbytes):
    header = replace(FrameHeader(MessageKind.REQUEST), **change)
    payload = bytes(nbytes)
    with pytest.raises(ProtocolError):
        unpack(pack(header, payload), payload)


def test_pieces_of_several_messages_are_not_mixed():
    parts = (bytes(PIECE_NBYTES), bytes(PIECE_NBYTES))
    one = list(split(FrameHeader(MessageKind.REQUEST, sequence=1), Message("a", parts=parts)))
    other = list(split(FrameHeader(MessageKind.REQUEST, sequence=2), Message("a", parts=parts)))
    for wrong in ([one[0], other[1]], [one[1]], [one[0], one[0]]):
        with pytest.raises(ProtocolError):
            received(wrong)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("topic", "x" * 25), ("topic", "é"), ("topic", "a\nb")),
        ("parts", (b"",) * 9),
    ],
)
def test_messages_that_do_not_fit_are_refused(field: str, value: object):
    with refused(field):
        Message(**({"topic": "a"} | {field: value}))
