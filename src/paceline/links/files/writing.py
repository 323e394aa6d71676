"""Write files that are complete or absent, even if the process is killed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path for writing; rename it to `path` if the block succeeds.

    If the block fails, the temporary file is removed.
    """
    partial = path.with_name(f".partial-{path.name}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file completely or not at all."""
    with written_whole(path) as partial:
        partial.write_text(text, encoding="utf-8")
