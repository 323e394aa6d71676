"""The five papers' own tables: an examination for the planner."""

from importlib import import_module

from paceline.core.errors import InvalidInput
from paceline.papers.cells import Paper

NAMES = ("cgdp", "wheel", "dgx1", "hogbatch", "dettmers8bit")


def paper(name: str) -> Paper:
    """Return a paper's tables with our values, which are computed now. InvalidInput for others."""
    if name not in NAMES:
        raise InvalidInput(f"paper: {name!r} is not known; choose one of {', '.join(NAMES)}")
    found: Paper = import_module(f"paceline.papers.{name}").paper()
    return found
