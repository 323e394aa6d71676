"""Predict the step times of strategies on a machine, and rank them."""

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
