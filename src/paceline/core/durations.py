"""Durations as sentences of plans and decisions name them."""


def duration(seconds: float) -> str:
    """Return seconds with three digits, from a second up with two decimals: "4.12 ms", "1.75 s"."""
    return f"{seconds:.2f} s" if seconds >= 0.9995 else f"{1e3 * seconds:.3g} ms"
