"""Write files that are whole or not there, whenever the process is killed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Give the block another path to write to, and rename it to this one if the block ends well.

    The other one is removed if the block raises; after `kill -9` it may be left.
    """
    partial = path.with_name(f".partial-{path.name}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with written_whole(path) as partial:
        partial.write_text(text, encoding="utf-8")
