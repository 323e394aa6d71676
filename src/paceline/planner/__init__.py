"""Predict the step time of each strategy on a machine, and rank the strategies."""

from paceline.planner.forecast import ERROR_BAR, Forecast, forecast
from paceline.planner.search import Ranking, Refusal, forecast_one, rank, search

__all__ = [
    "ERROR_BAR",
    "Forecast",
    "Ranking",
    "Refusal",
    "forecast",
    "forecast_one",
    "rank",
    "search",
]
