"""Numbers as pages and terminals show them, and the exact ones that are copied."""

from functools import partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.report.format import Quantity, change_text, duration, nbytes, number, share
from paceline.report.markup import table

SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
BYTES = {unit: 1024.0**i for i, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB", "PiB"))}


def parsed(text: str, units: dict[str, float]) -> float:
    """Read "2 h 5 min" back: pairs of a number and a unit."""
    words = text.replace(",", "").split()
    return sum(
        float(value) * units[unit] for value, unit in zip(words[::2], words[1::2], strict=True)
    )


NAN, INF = float("nan"), float("inf")
SHOWN = {
    duration: [
        *((0, "0 s"), (2.2e-19, "0 s"), (1.5e-9, "1.50 ns"), (999.4e-9, "999 ns")),
        *((999.6e-9, "1.00 us"), (0.0123456, "12.3 ms"), (0.9996, "1.00 s"), (-0.25, "-250 ms")),
        *((99.9, "99.9 s"), (99.96, "1 min 40 s"), (200, "3 min 20 s"), (5999.6, "1 h 40 min")),
        *((7500, "2 h 5 min"), (NAN, "nan")),
    ],
    nbytes: [
        *((0, "0 B"), (1000, "1000 B"), (10.5, "10.5 B"), (1023.7, "1.00 KiB"), (1536, "1.50 KiB")),
        *((1023.6 * 1024, "1.00 MiB"), (-2048, "-2.00 KiB"), (243e6, "232 MiB"), (INF, "inf")),
    ],
    number: [
        *((0, "0"), (NAN, "nan"), (0.1234, "0.123"), (12.34, "12.3"), (99.96, "100")),
        (12345.6, "12,346"),
    ],
    share: [(0.1234, "12.3 %"), (-0.0001, "0.0 %"), (NAN, "nan")],
    lambda value: share(value, 2): [(0.97222, "97.22 %")],
    partial(share, signed=True): [(0.05, "+5.0 %"), (-0.05, "-5.0 %"), (12.5, "+1,250.0 %")],
    change_text: [
        *((0.333, "+33.3 %"), (-1, "-100.0 %"), (8.9, "+890.0 %")),
        *((252.983, "254 times"), (None, "-")),  # from tenfold
    ],
}


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [(function, *row) for function, rows in SHOWN.items() for row in rows],
)
def test_numbers_are_shown_as(function, value, text: str) -> None:
    assert function(value) == text


@given(st.floats(1e-9, 1e9))
@example(59.999)
@example(5999.5)
def test_duration_is_within_half_a_percent_in_three_digits(seconds: float) -> None:
    assert parsed(duration(seconds), SECONDS) == pytest.approx(seconds, rel=0.00501)
    digits = duration(seconds).split()[0]
    assert seconds >= 99 or (digits.replace(".", "").isdigit() and len(digits) <= 4)


@given(st.floats(1, 1e17) | st.integers(1, 2**60) | st.integers(0, 1023))
def test_nbytes_is_within_half_a_percent(count: float) -> None:
    assert parsed(nbytes(count), BYTES) == pytest.approx(count, rel=0.00501)
    if count < 1024 and isinstance(count, int):
        assert nbytes(count) == f"{count} B"


@pytest.mark.parametrize(
    ("shown", "value", "unit"),
    [
        (duration(0.0123456789), 0.0123456789, "s"),
        (nbytes(1536), 1536, "bytes"),
        (share(-0.125), -12.5, "%"),
        (number(12345.678), 12345.678, ""),
    ],
)
def test_what_is_read_knows_the_exact_number(shown: Quantity, value: float, unit: str) -> None:
    assert (shown.value, shown.unit) == (pytest.approx(value), unit)
    assert type(f"{shown}") is str


def test_a_column_has_exact_numbers_below_one_unit_or_none() -> None:
    rows = [("a", duration(1 / 3), nbytes(5), "-"), ("b", duration(2e-6), duration(5), share(0.5))]
    drawn = table(("name", "time", "mixed", "part"), rows)
    assert '<th class="number" data-unit="s">time</th>' in drawn
    assert '<td class="number" data-value="0.333333333333">333 ms</td>' in drawn
    assert '<td class="number" data-value="2e-06">2.00 us</td>' in drawn
    assert '<th class="number">mixed</th>' in drawn
    assert '<td class="number">5 B</td>' in drawn
    assert '<td class="number">-</td>' in drawn
    assert '<td class="number" data-value="50">50.0 %</td>' in drawn
