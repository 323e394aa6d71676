"""Forecast what strategies would take on a machine, rank them, and say whether a codec pays."""

from paceline.planner.advice import Advice, advise
from paceline.planner.forecast import Forecast, chunk_seconds, forecast, rank
from paceline.planner.ranking import ERROR_BAR, Ranking, Refusal
from paceline.planner.search import search

__all__ = [
    "ERROR_BAR",
    "Advice",
    "Forecast",
    "Ranking",
    "Refusal",
    "advise",
    "chunk_seconds",
    "forecast",
    "rank",
    "search",
]
