"""The bytes that plans expect of codecs, and the share of values that thresholds send."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.codecs.names import find_codec
from paceline.codecs.stand_ins import stand_ins_for
from paceline.core.outcome import SentShare
from paceline.core.wire_format import PIECE, pieces, wire_format
from refusals import refused


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("half", 2),
        ("bfloat16", 2),
        ("dynamic8", 1 + 4 / 1024),
        ("e3m0", 129 / 256),
        ("onebit", 17 / 128),
    ],
)
def test_a_value_takes_its_bits_and_a_part_of_its_block(name, nbytes):
    known = wire_format(name)
    assert known.nbytes_per_value == nbytes
    assert known.nbytes(2**20) == nbytes * 2**20


@given(st.integers(1, 5 * PIECE))
def test_pieces_are_full_but_for_the_last(count):
    *full, last = pieces(count)
    assert set(full) <= {PIECE}
    assert 0 < last <= PIECE
    assert sum(full) + last == count


def test_shards_are_encoded_each_on_its_own():
    # 10 values for three ranks: shards of 4, each with a scale.
    assert wire_format("dynamic8").sharded_nbytes(10, 3) == 3 * (4 + 4)


def test_what_auto_encodes_can_be_planned_and_thresholds_only_with_a_share():
    assert wire_format("auto") == wire_format("dynamic8")
    for share in ("", "@0", "@1.5", "@-0.1", "@", "@nan", "@1%"):
        with refused("codec"):
            wire_format(f"threshold:0.5{share}")


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=5), st.floats(1e-4, 1))
def test_stand_ins_are_values_of_which_the_declared_share_is_sent_every_time(sizes, share):
    name, codec = f"threshold:0.5@{share!r}", find_codec(f"threshold:0.5@{share!r}")
    like = stand_ins_for(name)
    whole = torch.cat([like(torch.ones(size)) for size in sizes])
    for _ in range(3):  # error feedback changes nothing of it
        nbytes = codec.encode(whole).nbytes
        assert abs(nbytes - (4 + 4 * share * len(whole))) <= 2.001
        assert abs(nbytes - wire_format(name).nbytes(len(whole))) <= 4
    if len(whole):
        assert codec.sent_share == pytest.approx(share, abs=0.51 / len(whole))
        begin, end = len(whole) // 3, 2 * len(whole) // 3
        assert abs(int((whole[begin:end] > 0.5).sum()) - share * (end - begin)) <= 1.001


def test_other_codecs_send_as_much_of_any_values():
    assert [stand_ins_for(name) for name in (None, "dynamic8", "threshold:0.5")] == [None] * 3


def test_the_share_that_bytes_have_sent():
    # Three payloads of 100 values with 5, 6 and 7 words, and tau before each.
    assert wire_format("threshold:0.5@0.1").sent_share(100, 3 * 4 + 4 * 18, 3) == 18 / 300
    assert wire_format("threshold:0.5@0.1").sent_share(100, 0, 0) is None
    assert wire_format("half").sent_share(100, 200) is None


@pytest.mark.parametrize(
    ("measured", "is_off"),
    [(0.01, False), (0.0124, False), (0.0126, True), (0.0081, False), (0.0079, True), (0.0, True)],
)
def test_a_declared_share_that_is_off_by_a_quarter_has_a_warning(measured, is_off):
    found = SentShare.of("threshold:0.5@0.01", measured)
    assert (found.declared, found.measured) == (0.01, measured)
    assert (found.warning is not None) is is_off


def test_only_a_declared_share_is_checked():
    for codec in (None, "half", "threshold:1"):
        assert SentShare.of(codec, 0.1) is None
    assert SentShare.of("threshold:1@0.1", None) is None
