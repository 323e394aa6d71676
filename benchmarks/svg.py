"""Format the SVG elements of the benchmarks' pictures."""

FONT = 'font-family="sans-serif" font-size="14"'


def opening(width: float, height: float) -> str:
    """Return the start of an SVG with a white background."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {FONT}>\n'
        f'<rect width="{width}" height="{height}" fill="white"/>'
    )


def text(left: float, base: float, content: str, style: str = 'fill="#222"') -> str:
    """Return a line of text."""
    return f'<text x="{left:.1f}" y="{base:.1f}" {style}>{content}</text>'


def box(
    left: float, top: float, width: float, height: float, colour: str, opacity: float = 1.0
) -> str:
    """Return a filled rectangle, which is translucent if `opacity` is below 1."""
    seen = "" if opacity == 1.0 else f' fill-opacity="{opacity:g}"'
    return (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{colour}"{seen}/>'
    )
