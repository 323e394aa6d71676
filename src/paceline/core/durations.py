"""Format durations for messages."""


def duration(seconds: float) -> str:
    """Format seconds with three digits, or two decimals from 1 s on: "4.12 ms", "1.75 s"."""
    return f"{seconds:.2f} s" if seconds >= 0.9995 else f"{1e3 * seconds:.3g} ms"
