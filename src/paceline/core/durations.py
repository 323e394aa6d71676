"""Format durations for messages."""


def duration(seconds: float) -> str:
    """Format seconds: "4.12 ms" (three digits) below 1 s, else "1.75 s" (two decimals)."""
    return f"{seconds:.2f} s" if seconds >= 0.9995 else f"{1e3 * seconds:.3g} ms"
