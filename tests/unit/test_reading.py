"""What peers send: JSON of any shape, records with any value, and gradients of any size."""

import json
import tracemalloc
from contextlib import suppress
from math import inf, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from paceline.core.cost import compute_lane
from paceline.core.errors import InvalidInput
from paceline.core.plan import Kind
from paceline.core.reading import read_json, read_record
from paceline.core.timeline import Span
from paceline.rpc.proportion import Proportions, norm_of
from paceline.rpc.reading import PerSecond, Seconds, check_spans
from paceline.rpc.workers import difference
from refusals import refused

SPAN = Span(Kind.FORWARD, 3, "fc", 1, (compute_lane("cpu1"),), 1.0, 2.0)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.mark.parametrize("data", [b"[" * 10**5, b'{"a":' * 10**5, b"[" * 500 + b"]" * 500])
def test_depth_is_refused_and_takes_no_memory(data: bytes):
    tracemalloc.start()
    try:
        with refused("layout"):
            read_json(data, "layout")
        assert tracemalloc.get_traced_memory()[1] < 3 * len(data) + 2**20
    finally:
        tracemalloc.stop()


@given(st.binary() | st.text().map(str.encode) | ANY_JSON.map(json.dumps).map(str.encode))
def test_anything_is_a_value_or_refused(data: bytes):
    with suppress(InvalidInput):
        read_json(data, "layout")


@given(ANY_JSON, ANY_JSON)
def test_a_layout_of_any_shape_is_compared(value: object, other: object):
    here = {"samples": [4, 1], "body": {"a": "float32 [3]"}}
    there = here | {"body": value, "more": other}
    try:
        found = difference(json.dumps(here), json.dumps(there))
    except InvalidInput:
        return
    assert (found is None) == (value == here["body"] and set(there) == set(here))


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1", "1e400", '"x"', "[]", "null", "1e31"])
@pytest.mark.parametrize("kind", [Seconds, PerSecond])
def test_numbers_that_cannot_be_are_refused_by_name(value: str, kind: object):
    adapter: TypeAdapter[dict[str, float]] = TypeAdapter(dict[str, kind])  # type: ignore[valid-type]
    with refused("profile"):
        read_record(adapter, f'{{"a": {value}}}'.encode(), "profile")


@pytest.mark.parametrize(
    "change",
    [
        {"worker": 0},
        {"worker": None},
        {"start_s": nan},
        {"end_s": inf},
        {"end_s": 0.5},
        {"start_s": -1.0},
        {"step": -1},
        {"step": 2**31},
        {"part": "x" * 201},
        {"on": SPAN.on * 17},
        {"on": (compute_lane("x" * 201),)},
    ],
)
def test_spans_that_cannot_be_are_refused(change: dict[str, object]):
    check_spans([SPAN], 1, "trace")
    with refused("trace"):
        check_spans([SPAN, SPAN._replace(**change)], 1, "trace")


def test_gradients_are_judged_by_those_of_others_and_not_by_their_own():
    proportions = Proportions()

    def check(worker: int, norm: float) -> None:
        proportions.check(worker, norm, lambda: 10.0)

    check(0, 1e7)  # nothing is known but the parameters
    with refused("gradients"):
        check(0, 1.2e7)
    for _ in range(100):
        check(1, 2.0)
        check(2, 0.0)
    check(0, 199.0)
    for _ in range(100):
        with refused("gradients"):
            check(0, 201.0)
    check(1, 10.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_norm_of_large_values_does_not_overflow(dtype: torch.dtype):
    found = norm_of([torch.full((4,), 1e30, dtype=dtype), torch.full((12,), 1e30, dtype=dtype)])
    assert found == pytest.approx(4e30, rel=1e-2)
    assert norm_of([torch.tensor([1.0, nan])]) != norm_of([torch.ones(1)])
