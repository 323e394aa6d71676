"""Predict the step times of strategies on a machine, and rank them."""

from paceline.planner.forecast import ERROR_BAR, Forecast, forecast
from paceline.planner.ranking import Ranking, Refusal, rank
from paceline.planner.search import forecast_one, search

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
