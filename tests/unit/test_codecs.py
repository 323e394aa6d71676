"""The contract of all codecs: payloads, tables, and the payload sizes that plans predict."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from codec_cases import normal
from paceline.codecs.blockwise import EightBit, FourBit
from paceline.codecs.codec import Cast, Codec, Payload, pack, row_nbytes, unpack
from paceline.codecs.feedback import ErrorFeedback, OneBit, Threshold
from paceline.codecs.names import CODECS, find_codec
from paceline.codecs.quantization import FOUR_BIT_TABLES, table
from paceline.codecs.stand_ins import stand_ins_for
from paceline.core.errors import InvalidInput
from paceline.core.outcome import SentShare
from paceline.core.wire_format import WIRE_FORMATS, remembers, wire_format
from refusals import refused

MADE: dict[str, Callable[[], Codec]] = {
    **{name: lambda name=name: find_codec(name) for name in CODECS},
    "linear8 of one scale": lambda: EightBit("linear8", offset=10.0),
    "dynamic8 in blocks of 5": lambda: EightBit("dynamic8", block_size=5),
    "e3m0 in blocks of 64": lambda: FourBit("e3m0", 64),
    "float32": lambda: Cast("float32"),
    "onebit alone": lambda: OneBit(16),
    "threshold": lambda: Threshold(0.5),
}
each_codec = pytest.mark.parametrize("make", MADE.values(), ids=MADE)


def through(codec: Codec, values: Tensor) -> Tensor:
    return codec.decode(codec.encode(values))


@each_codec
def test_a_payload_survives_the_wire(make: Callable[[], Codec]):
    for count in (0, 1, 5, 1000, 1025, 5000):
        codec = make()
        payload = codec.encode(normal(count))
        assert payload.nbytes == codec.nbytes(count) or not codec.fixed_size
        assert payload.nbytes <= codec.nbytes(count)
        rows = pack([payload], row_nbytes(codec.nbytes(count)), torch.device("cpu"))
        [received] = unpack(rows, codec.name, count)
        assert (received.count, received.codec, received.num_nonfinite) == (count, codec.name, 0)
        values = codec.decode(payload)
        assert torch.equal(codec.decode(received), values)
        # Decode into a strided part of a larger tensor.
        memory = torch.stack([normal(count, 1)] * 2, 1)
        codec.add_to(memory[:, 1], received)
        assert torch.equal(memory[:, 1], normal(count, 1) + values)
        codec.decode(received, memory[:, 1])
        assert torch.equal(memory, torch.stack([normal(count, 1), values], 1))


@each_codec
def test_values_have_the_order_of_flatten_and_zero_stays_zero(make: Callable[[], Codec]):
    matrix = normal(600).view(20, 30)
    torch.manual_seed(0)
    transposed = through(make(), matrix.T)
    torch.manual_seed(0)
    assert torch.equal(transposed, through(make(), matrix.T.reshape(-1)))
    assert torch.equal(through(make(), torch.tensor([0.0, -0.0] * 40)), torch.zeros(80))


@each_codec
def test_values_that_are_not_finite_are_counted_and_become_zero(make: Callable[[], Codec]):
    codec, values = make(), normal(100)
    values[[3, 50, 99]] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    payload = codec.encode(values)
    assert payload.num_nonfinite == 3
    decoded = codec.decode(payload)
    assert decoded.isfinite().all()
    if not codec.name.startswith("onebit"):  # onebit has no code for zero
        assert decoded[[3, 50, 99]].tolist() == [0, 0, 0]


@each_codec
def test_only_float32_is_encoded_and_only_its_own_payloads_are_decoded(make):
    codec = make()
    with refused("values"):
        codec.encode(torch.zeros(3, dtype=torch.float64))
    payload = codec.encode(normal(10))
    for other in (Payload("other", 10, payload.buffers), Payload(codec.name, 10, ())):
        with refused("payload"):
            codec.decode(other)
    for target in (torch.zeros(9), torch.zeros(10, dtype=torch.float64)):
        with refused("payload"):
            codec.decode(payload, target)
        with refused("payload"):
            codec.add_to(target, payload)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("size", [1e36, 3.4e38])
def test_values_that_are_too_large_are_counted_and_never_infinite(name: str, size: float):
    values = size * torch.tensor([1.0, -1.0]).repeat(1000)
    codec = find_codec(name)
    payload = codec.encode(values)
    decoded = codec.decode(payload)
    assert decoded.isfinite().all()
    if payload.num_nonfinite == 0:
        # All values have one magnitude; the largest code decodes to at least 0.88 of it.
        assert (decoded / size - values / size).abs().max() < 0.12
    else:
        assert payload.num_nonfinite == len(values)


@pytest.mark.parametrize(
    ("codec", "values", "received"),
    [
        (OneBit(4), [1.0, 3.0, -2.0, -6.0, 0.0, 5.0], [2.0, 2.0, -4.0, -4.0, 2.5, 2.5]),
        (Threshold(0.5), [0.4, 0.6, -9.0, -0.5], [0.0, 0.5, -0.5, 0.0]),
    ],
)
def test_onebit_sends_the_mean_of_each_sign_and_threshold_what_is_large(codec, values, received):
    assert through(codec, torch.tensor(values)).tolist() == received


@pytest.mark.parametrize(
    "inner",
    [OneBit(16), EightBit("linear8"), Threshold(0.3), *map(FourBit, FOUR_BIT_TABLES)],
    ids=lambda one: one.name,
)
@given(st.integers(0, 100))
def test_error_feedback_keeps_the_lost_part_and_its_state_is_loaded(inner: Codec, seed: int):
    """The sent values plus the error equal the given values, up to rounding."""
    codec, total, sent = ErrorFeedback(inner), torch.zeros(40), torch.zeros(40)
    for step in range(20):
        values = normal(40, 100 * seed + step)
        total += values
        sent += through(codec, values)
    owed = codec.state_dict()["error"]
    assert torch.allclose(sent + owed, total, atol=1e-4)
    other = ErrorFeedback(inner)
    other.load_state_dict(codec.state_dict())
    assert torch.equal(through(codec, normal(40)), through(other, normal(40)))
    with refused("values"):
        codec.encode(normal(41))


@pytest.mark.parametrize("name", FOUR_BIT_TABLES)
def test_the_errors_of_four_bits_do_not_grow(name: str):
    codec = find_codec(f"{name}+feedback")
    for step in range(20):
        codec.encode(normal(3000, step))
    assert codec.state_dict()["error"].abs().mean() < 0.5  # the mean magnitude of a value is 0.8


@pytest.mark.parametrize(
    ("make", "field", "got"),
    [
        (lambda: find_codec("fp8"), "codec", None),
        (lambda: find_codec("auto"), "codec", None),
        (lambda: find_codec("threshold:-1"), "codec", None),
        *(  # a wire format requires a valid declared share
            (lambda share=share: wire_format(f"threshold:0.5{share}"), "codec", None)
            for share in ("", "@0", "@1.5", "@-0.1", "@", "@nan", "@1%")
        ),
        (lambda: EightBit("fp8"), "type", None),
        (lambda: FourBit("e2m1"), "type", None),
        (lambda: EightBit("dynamic8", 0), "block_size", 0),
        (lambda: EightBit("dynamic8", offset=0.0), "offset", 0.0),
        (lambda: OneBit(0), "block_size", 0),
        *((lambda size=size: FourBit("e3m0", size), "block_size", size) for size in (-2, 0, 1, 33)),
        (lambda: Threshold(0.0), "tau", 0.0),
        (lambda: Threshold(torch.inf), "tau", torch.inf),
    ],
)
def test_what_is_no_codec_is_refused(make: Callable[[], Codec], field: str, got: object):
    with refused(field, **({} if got is None else {"got": got})):
        make().encode(torch.zeros(1))


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=5, max_size=5), st.integers(0, 20))
def test_a_row_with_a_wrong_header_is_refused_or_carries_no_more_than_it_holds(header, words):
    row = torch.tensor([*header, *range(words)]).view(torch.uint8).unsqueeze(0)
    try:
        [payload] = unpack(row, "linear8", 5)
    except InvalidInput:
        return
    assert payload.nbytes <= 8 * words


@given(
    st.binary(max_size=200),
    st.integers(0, 300) | st.integers(2**40, 2**63),
    st.lists(st.integers(0, 60), max_size=3),
)
def test_a_payload_with_wrong_contents_is_refused(body, count, sizes):
    """A malicious payload is decoded or refused; any other error fails the test."""
    whole = torch.tensor(list(body.ljust(200, b"x")), dtype=torch.uint8)
    buffers = tuple(whole[:size] for size in sizes)
    inner = (EightBit("dynamic8", 16), FourBit("dynamic4", 16), OneBit(16), Threshold(0.5))
    for codec in (*inner, find_codec("half")):
        payload = Payload(codec.name, count, buffers)
        try:
            assert len(codec.decode(payload)) == count
        except InvalidInput:
            continue
        assert payload.nbytes == codec.nbytes(count) or not codec.fixed_size
        assert payload.nbytes <= codec.nbytes(count)


@pytest.mark.parametrize("name", sorted({*CODECS, *WIRE_FORMATS}))
@given(count=st.integers(1, 10**8))
def test_plans_know_what_codecs_make_and_do_with_sums_and_errors(name, count):
    codec, known = find_codec(name), wire_format(name)
    assert known.nbytes(count) == codec.nbytes(count)
    assert known.encodes_sums == codec.encodes_sums
    assert known.remembers == remembers(name) == isinstance(codec, ErrorFeedback)


@pytest.mark.parametrize(
    ("name", "decades"),
    [
        ("dynamic8", [64, 32, 16, 8, 4, 2, 1]),
        ("static8", [16] * 7 + [15]),  # the smallest is zero
    ],
)
def test_trees_have_the_leaves_of_the_paper_in_each_decade_and_zero(name: str, decades: list[int]):
    magnitudes = table(name).magnitudes.double()
    found = [
        int(((10.0**-n > magnitudes) & (magnitudes > 10.0 ** -(n + 1))).sum())
        for n in range(len(decades))
    ]
    assert (found, len(magnitudes), magnitudes[0]) == (decades, 128, 0)
    assert (magnitudes.diff() > 0).all()
    if name == "dynamic8":
        assert magnitudes[-1] == pytest.approx(1 - 0.9 / 128)
        assert magnitudes[1] == pytest.approx(0.55e-6)  # the centre of (0.1, 1), times 10^-6


def test_linear8_is_equally_spaced_and_the_mantissa_holds_the_digits_up_to_fifteen():
    assert torch.equal(table("linear8").magnitudes, (torch.arange(128).double() / 127).float())
    magnitudes = table("mantissa8").magnitudes
    ones = magnitudes[(magnitudes > 0.0999) & (magnitudes < 1.0001)].tolist()
    assert ones == pytest.approx(
        [0.1, 0.11, 0.12, 0.13, 0.14, 0.15, *(i / 10 for i in range(2, 11))]
    )


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=5), st.floats(1e-4, 1))
def test_stand_ins_send_the_declared_share_in_every_step(sizes, share):
    name, codec = f"threshold:0.5@{share!r}", find_codec(f"threshold:0.5@{share!r}")
    like = stand_ins_for(name)
    whole = torch.cat([like(torch.ones(size)) for size in sizes])
    for _ in range(3):  # error feedback does not change the share
        nbytes = codec.encode(whole).nbytes
        assert abs(nbytes - (4 + 4 * share * len(whole))) <= 2.001
        assert abs(nbytes - wire_format(name).nbytes(len(whole))) <= 4
    if len(whole):
        assert codec.sent_share == pytest.approx(share, abs=0.51 / len(whole))
        begin, end = len(whole) // 3, 2 * len(whole) // 3
        assert abs(int((whole[begin:end] > 0.5).sum()) - share * (end - begin)) <= 1.001


def test_the_sent_share_follows_from_the_bytes():
    # Three payloads of 100 values: each has 4 bytes for tau; together they have 18 words.
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


def test_only_a_declared_share_is_checked_and_has_stand_ins():
    for codec in (None, "half", "threshold:1"):
        assert SentShare.of(codec, 0.1) is stand_ins_for(codec) is None


def test_a_block_size_beyond_the_values_takes_no_memory():
    values = torch.tensor([0.5, -1.0, 0.0])
    codec = EightBit("linear8", block_size=2**50)
    assert (codec.decode(codec.encode(values)) - values).abs().max() < 1 / 127
