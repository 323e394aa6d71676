"""Compare the tables of five papers with the planner's values."""

from importlib import import_module

from paceline.core.names import not_known
from papers.paper_tables import Paper

NAMES = ("cgdp", "wheel", "dgx1", "hogbatch", "dettmers8bit")


def paper(name: str) -> Paper:
    """Compute a paper's tables with our values. Raises InvalidInput for an unknown name."""
    if name not in NAMES:
        raise not_known("paper", name, NAMES)
    return import_module(f"papers.{name}").paper()
