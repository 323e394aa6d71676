"""Rows of a plan with default values."""

from typing import Any

from paceline.records.result import PlanRow


def plan_row(**facts: Any) -> PlanRow:
    """Return a row of strategy allreduce on two devices, with fields replaced by `facts`."""
    usual: dict[str, Any] = {
        "strategy": "allreduce",
        "config": {},
        "workers": 2,
        "placement": "as listed",
        "devices": ("cpu0", "cpu1"),
        "step_s": 0.011,
        "range_share": 0.13,
        "samples_per_s": 5818,
        "efficiency": 0.9,
        "exposed_s": 0.001,
        "wire_nbytes_per_step": 493_648,
        "link_nbytes_per_step": {"host->host": 493_648},
        "memory_nbytes": {"cpu0": 2**20, "cpu1": 2**20},
        "why": "computes 90 % of the step",
    }
    return PlanRow(**(usual | facts))
