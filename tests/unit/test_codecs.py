"""Codecs, and the payloads that carry what they have made."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.codecs.blockwise import TABLES, EightBit
from paceline.codecs.codec import Codec, Payload, pack, row_nbytes, unpack
from paceline.codecs.feedback import ErrorFeedback, OneBit, Threshold
from paceline.codecs.names import CODECS, find_codec
from paceline.core.errors import InvalidInput

MADE = {
    **{name: lambda name=name: find_codec(name) for name in CODECS},
    "linear8 of one scale": lambda: EightBit("linear8", offset=10.0),
    "dynamic8 in blocks of 5": lambda: EightBit("dynamic8", block_size=5),
    "onebit alone": lambda: OneBit(16),
    "threshold": lambda: Threshold(0.5),
}


@pytest.fixture(params=MADE)
def codec(request: pytest.FixtureRequest) -> Codec:
    return MADE[request.param]()


def normal(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [0, 1, 5, 1000, 5000])
def test_a_payload_survives_the_wire(codec: Codec, count: int):
    payload = codec.encode(normal(count))
    rows = pack([payload], row_nbytes(codec.nbytes(count)), torch.device("cpu"))
    [received] = unpack(rows, codec.name, count)
    assert torch.equal(codec.decode(received), codec.decode(payload))
    assert (received.count, received.codec, received.num_nonfinite) == (count, codec.name, 0)
    assert payload.nbytes <= codec.nbytes(count)
    total = normal(count, 1)
    expected = total + codec.decode(payload)
    codec.add_to(total, received)
    assert torch.equal(total, expected)


def test_zero_stays_zero(codec: Codec):
    assert torch.equal(codec.decode(codec.encode(torch.tensor([0.0, -0.0] * 40))), torch.zeros(80))


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_a_tensor_is_taken_in_the_order_of_its_values(make):
    matrix = normal(600).view(20, 30)
    one, other = make(), make()
    transposed = one.decode(one.encode(matrix.T))
    assert torch.equal(transposed, other.decode(other.encode(matrix.T.reshape(-1))))


def test_what_is_not_finite_is_counted_and_becomes_zero(codec: Codec):
    values = normal(100)
    values[[3, 50, 99]] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    payload = codec.encode(values)
    assert payload.num_nonfinite == 3
    decoded = codec.decode(payload)
    assert decoded.isfinite().all()
    if not codec.name.startswith("onebit"):  # whose levels have no zero
        assert decoded[[3, 50, 99]].tolist() == [0, 0, 0]


def test_what_half_cannot_hold_is_counted():
    payload = find_codec("half").encode(torch.tensor([1.0, 65504.0, 1e5]))
    assert payload.num_nonfinite == 1
    assert find_codec("half").decode(payload).tolist() == [1.0, 65504.0, 0.0]


def test_other_types_than_float32_are_refused(codec: Codec):
    with pytest.raises(InvalidInput, match="float64 cannot be encoded"):
        codec.encode(torch.zeros(3, dtype=torch.float64))


def test_an_unknown_name_is_refused_with_those_that_are_known():
    with pytest.raises(InvalidInput, match="'fp8' is not known; choose one of dynamic8, static8"):
        find_codec("fp8")


@pytest.mark.parametrize("name", TABLES)
def test_eight_bits_lose_little(name: str):
    values = normal(10_000)
    codec = EightBit(name)
    error = (codec.decode(codec.encode(values)) - values).abs().mean() / values.abs().mean()
    assert error < 0.08


def test_onebit_sends_the_mean_of_each_sign():
    values = torch.tensor([1.0, 3.0, -2.0, -6.0, 0.0, 5.0])
    decoded = OneBit(4).decode(OneBit(4).encode(values))
    assert decoded.tolist() == [2.0, 2.0, -4.0, -4.0, 2.5, 2.5]


def test_threshold_sends_what_is_large():
    decoded = Threshold(0.5).decode(Threshold(0.5).encode(torch.tensor([0.4, 0.6, -9.0, -0.5])))
    assert decoded.tolist() == [0.0, 0.5, -0.5, 0.0]


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("size", [1e36, 3.4e38])
def test_what_a_codec_cannot_hold_is_counted_and_never_infinite(name: str, size: float):
    values = size * torch.tensor([1.0, -1.0]).repeat(1000)
    codec = find_codec(name)
    payload = codec.encode(values)
    decoded = codec.decode(payload)
    assert decoded.isfinite().all()
    if payload.num_nonfinite == 0:
        # All have one magnitude: the largest code of a type is at least 0.88 of it.
        assert (decoded / size - values / size).abs().max() < 0.12
    else:
        assert payload.num_nonfinite == len(values)


@pytest.mark.parametrize(("value", "a_step"), [(0.03, None), (0.099, None), (1.0, 0.1)])
def test_threshold_is_within_tau_of_small_constants_and_sends_tau_of_large_ones(
    value: float, a_step: float | None
):
    tau, num_steps = 0.1, 100
    codec, sent = ErrorFeedback(Threshold(tau)), 0.0
    for _ in range(num_steps):
        sent += float(codec.decode(codec.encode(torch.tensor([value]))))
    if a_step is None:
        assert abs(sent - num_steps * value) <= tau * (1 + 1e-4)
    else:
        assert sent == pytest.approx(num_steps * a_step)
    assert sent + float(codec.state_dict()["error"]) == pytest.approx(num_steps * value, rel=1e-4)


@given(st.integers(0, 10), st.sampled_from(["onebit", "linear8", "threshold"]))
def test_error_feedback_loses_nothing_in_the_long_run(seed: int, name: str):
    """What was sent and what is still owed are together what was given, but for rounding."""
    inner = {"onebit": OneBit(16), "linear8": EightBit("linear8"), "threshold": Threshold(0.3)}[
        name
    ]
    codec, given_s, sent = ErrorFeedback(inner), torch.zeros(40), torch.zeros(40)
    for step in range(20):
        values = normal(40, 100 * seed + step)
        given_s += values
        sent += codec.decode(codec.encode(values))
    assert torch.allclose(sent + codec.state_dict()["error"], given_s, atol=1e-4)


def test_error_feedback_goes_on_after_a_checkpoint():
    one, other = ErrorFeedback(OneBit(16)), ErrorFeedback(OneBit(16))
    one.encode(normal(40))
    other.load_state_dict(one.state_dict())
    assert torch.equal(
        one.decode(one.encode(normal(40, 1))), other.decode(other.encode(normal(40, 1)))
    )
    with pytest.raises(InvalidInput, match="an ErrorFeedback of its own"):
        one.encode(normal(41))


def test_a_payload_of_another_codec_is_refused():
    payload = EightBit("dynamic8").encode(normal(10))
    with pytest.raises(
        InvalidInput, match=r"made by codec 'dynamic8/1024', and not by 'linear8/1024'"
    ):
        EightBit("linear8").decode(payload)


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
    """Whoever writes payloads on purpose may cause errors, but no more."""
    whole = torch.tensor(list(body.ljust(200, b"x")), dtype=torch.uint8)
    buffers = [whole[:size] for size in sizes]
    for codec in (EightBit("dynamic8", 16), OneBit(16), Threshold(0.5), find_codec("half")):
        payload = Payload(codec.name, count, tuple(buffers))
        try:
            codec.decode(payload)
        except InvalidInput:
            continue
        assert payload.nbytes <= codec.nbytes(count)
