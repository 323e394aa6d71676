"""Synthetic cells of a scaling study, by a simple formula with known conclusions."""

from itertools import product
from typing import Any

from paceline.records.scale import ScaleCell, Scaling


def cell(method: str = "allreduce", workers: int = 1, batch: int = 16, **facts: Any) -> ScaleCell:
    """Return a measured cell of strong scaling with an epoch of 10 s; `facts` replace fields."""
    epoch_s = facts.get("epoch_s", 10.0)
    usual: dict[str, Any] = {
        "scaling": "strong",
        "kind": "measured",
        "epoch_s": epoch_s,
        "spread": (epoch_s, epoch_s),
        "forward_s": 0.3 * epoch_s,
        "backward_s": 0.6 * epoch_s,
        "exposed_s": 0.05 * epoch_s,
        "update_s": 0.03 * epoch_s,
        "idle_s": 0.02 * epoch_s,
        "hidden_s": 0.0,
        "memory_bytes": 2**30,
        "capacity_bytes": 16e9,
    }
    return ScaleCell(method=method, workers=workers, batch=batch, **(usual | facts))


def failed(method: str = "allreduce") -> ScaleCell:
    """Return a failed cell."""
    facts = {"scaling": "strong", "kind": "measured", "error": "worker 1 was ended by SIGKILL"}
    return ScaleCell(method=method, workers=1, batch=16, **facts)


def study(
    methods: dict[str, float], workers: tuple[int, ...], scaling: Scaling = "strong"
) -> list[ScaleCell]:
    """Return cells: workers share 100 s of computation, and each method adds its seconds."""

    def one(method: str, count: int) -> ScaleCell:
        own_s = 100.0 / count if scaling == "strong" else 100.0
        exposed_s = methods[method] if count > 1 else 0.0
        parts = {"forward_s": own_s / 3, "backward_s": own_s * 2 / 3, "exposed_s": exposed_s}
        parts |= {"update_s": 0.0, "idle_s": 0.0, "epoch_s": own_s + exposed_s}
        return cell(method, count, scaling=scaling, **parts)

    return [one(*which) for which in product(methods, workers)]


def model_source(name: str, *forward: str) -> str:
    """Return a Python module with a model of one layer, of 4 inputs and 10 outputs."""
    head = f"""
import os
import torch
from torch import nn

class {name}(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 10)
    def forward(self, x):
"""
    return head + "".join(f"        {line}\n" for line in forward)
