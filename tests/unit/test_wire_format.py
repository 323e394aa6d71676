import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.codecs.feedback import ErrorFeedback
from paceline.codecs.names import CODECS, find_codec
from paceline.core.errors import InvalidInput
from paceline.core.wire_format import PIECE, WIRE_FORMATS, pieces, remembers, wire_format


def test_every_codec_of_a_fixed_size_has_a_format():
    assert set(CODECS) == set(WIRE_FORMATS)


@pytest.mark.parametrize("name", WIRE_FORMATS)
@given(count=st.integers(1, 10**8))
def test_plans_know_how_many_bytes_codecs_make(name, count):
    assert wire_format(name).nbytes(count) == find_codec(name).nbytes(count)


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


@pytest.mark.parametrize("name", WIRE_FORMATS)
def test_plans_know_what_codecs_do_with_sums_and_errors(name):
    codec = find_codec(name)
    assert wire_format(name).encodes_sums == codec.encodes_sums
    assert remembers(name) == isinstance(codec, ErrorFeedback)


def test_what_auto_encodes_can_be_planned_and_a_threshold_cannot():
    assert wire_format("auto") == wire_format("dynamic8")
    with pytest.raises(InvalidInput, match=r"how many bytes 'threshold:0\.5' takes; a plan needs"):
        wire_format("threshold:0.5")
