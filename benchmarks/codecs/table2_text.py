"""The figures of table2.py, as the README shows them."""

from collections.abc import Iterator
from typing import Any

from readme import table

_TOLERANCE = 0.1


def text(figures: dict[str, Any]) -> str:
    """Return the tables, and what they say of the printed figures."""
    rows = [
        (distribution, name, ways)
        for distribution, found in figures["distributions"].items()
        for name, ways in found["types"].items()
    ]
    return "\n\n".join(
        [
            _relative(rows, figures["count"]),
            *_on_relative(rows),
            *_on_largest(figures["distributions"]),
            _absolute(rows),
            *_on_absolute(rows, figures),
            _examples(figures["examples"]),
            *_on_bitsandbytes(figures["unreachable"]),
        ]
    )


Rows = list[tuple[str, str, dict[str, Any]]]


def _relative(rows: Rows, count: int) -> str:
    head = ("values", "type", "printed", "ours", "by printed", "bitsandbytes", "published search")
    lines = [
        (
            distribution,
            name,
            f"{100 * ways['printed']['relative']:.2f}",
            f"{100 * ways['nearest']['relative']:.2f}",
            f"{_by_printed(ways, 'nearest'):.2f}",
            f"{100 * ways['bitsandbytes']['relative']:.2f}" if "bitsandbytes" in ways else "",
            f"{100 * ways['published']['relative']:.2f}",
            f"{_by_printed(ways, 'published'):.2f}",
        )
        for distribution, name, ways in rows
    ]
    title = f"Mean relative error in %, {count:,} values"
    return table(title, [*head, "by printed"], lines)


def _by_printed(ways: dict[str, Any], way: str) -> float:
    ratio: float = ways[way]["relative"] / ways["printed"]["relative"]
    return ratio


def _on_relative(rows: Rows) -> Iterator[str]:
    ours = [_by_printed(ways, "nearest") for _, _, ways in rows]
    search = [_by_printed(ways, "published") for _, _, ways in rows]
    within = sum(abs(ratio - 1) <= _TOLERANCE for ratio in search)
    yield (
        f"The nearest code loses {min(ours):.2f} to {max(ours):.2f} times what is printed. With "
        "trees that are first cut at 0.45, and a search that skips every second entry (*published "
        f"search*), {within} of {len(search)} are within {_TOLERANCE:.0%} of the printed figure: "
        f"{min(search):.2f} to {max(search):.2f} times it."
    )


def _on_largest(distributions: dict[str, Any]) -> Iterator[str]:
    largest = (f"{found['largest']:.3g} of {name}" for name, found in distributions.items())
    yield f"The largest magnitudes, by which dynamic8 and linear8 are scaled: {', '.join(largest)}."


def _absolute(rows: Rows) -> str:
    head = (
        "values",
        "type",
        "printed as absolute",
        "ours, absolute",
        "published search, absolute",
        "published search, squared",
        "squared by printed",
    )
    lines = [
        (
            distribution,
            name,
            f"{ways['printed']['absolute']:g}",
            f"{ways['nearest']['absolute']:.2g}",
            f"{ways['published']['absolute']:.2g}",
            f"{ways['published']['squared']:.2g}",
            f"{_squared_by_printed(ways):.2g}",
        )
        for distribution, name, ways in rows
    ]
    return table("Mean absolute and mean squared error", head, lines)


def _squared_by_printed(ways: dict[str, Any]) -> float:
    ratio: float = ways["published"]["squared"] / ways["printed"]["absolute"]
    return ratio


def _on_absolute(rows: Rows, figures: dict[str, Any]) -> Iterator[str]:
    least, printed = figures["least_absolute"], _printed_absolute(rows)
    yield (
        f"No 256 magnitudes have a mean absolute error below 1/(4*256) = {least['closed_form']:.5f}"
        f" on U(0,1) (equal intervals, measured: {least['measured']:.5f}); printed are "
        f"{printed['U(0,1)', 'dynamic8']:g} and {printed['U(0,1)', 'static8']:g}."
    )
    growth = [
        printed["N(0,10^2)", name] / printed["N(0,1)", name] for name in ("dynamic8", "linear8")
    ]
    ratios = {
        f"{name} on {distribution}": _squared_by_printed(ways) for distribution, name, ways in rows
    }
    fits = [ratio for ratio in ratios.values() if 0.5 < ratio < 2]
    others = [name for name, ratio in ratios.items() if not 0.5 < ratio < 2]
    yield (
        "From N(0,1) to N(0,10^2) an absolute error grows 10 times where values are scaled by "
        f"their largest; the printed ones grow {growth[0]:.0f} and {growth[1]:.0f} times, as "
        f"squares do. {len(fits)} of {len(ratios)} are {min(fits):.2f} to {max(fits):.2f} times "
        f"the mean square of the published search; {' and '.join(others)} fits neither."
    )


def _printed_absolute(rows: Rows) -> dict[tuple[str, str], float]:
    return {(distribution, name): ways["printed"]["absolute"] for distribution, name, ways in rows}


def _examples(examples: list[dict[str, float]]) -> str:
    head = ("value", "printed", "bisected at 0.55, 0.325, ...", "first cut at 0.45")
    lines = [tuple(f"{one[key]:.6g}" for key in _EXAMPLE) for one in examples]
    return table("The paper's examples of trees, section 3.1", head, lines)


_EXAMPLE = ("value", "printed", "halves", "published")


def _on_bitsandbytes(unreachable: dict[str, list[float]] | None) -> Iterator[str]:
    if unreachable:
        meanings = ", ".join(f"{meaning:g}" for meaning in unreachable["meanings"])
        yield (
            f"bitsandbytes never writes {len(unreachable['codes'])} of its 256 codes, "
            f"{', '.join(map(str, unreachable['codes']))}: {meanings}. A zero beside a one becomes "
            f"{unreachable['zero_becomes'][0]:g}."
        )
