"""Train PyTorch models in parallel on uneven hardware, and predict the gain beforehand.

Importing `paceline` touches no device, starts no thread, and does not import torch.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if sys.platform != "linux":
    raise ImportError(
        f"Paceline runs only on Linux (it uses futexes and memfd); this system is {sys.platform}. "
        "On Windows, install Paceline in WSL 2; on macOS, in a Linux container."
    )

if TYPE_CHECKING:
    from paceline.codecs.codec import Codec
    from paceline.core.errors import (
        InvalidInput,
        NonFinite,
        PacelineError,
        WorkerLost,
        WorkersFailed,
    )
    from paceline.core.machine import Machine
    from paceline.core.settings import RehearseSettings, TrainSettings
    from paceline.core.strategy import Strategy
    from paceline.core.timeline import Timeline
    from paceline.exchange.all_reduce import ddp_hook
    from paceline.exchange.local_updates import LocalUpdates
    from paceline.integrations.data_parallel import DataParallel
    from paceline.planner import Forecast, Ranking
    from paceline.records.result import PlanResult, RunResult
    from paceline.runs.planning import forecast, plan, sweep
    from paceline.runs.running import Run, rehearse, train
    from paceline.training.recipes.recipe import Recipe

__version__: str

# Import each module only when one of its names is used, because most modules import torch.
_MODULES = {
    "paceline.runs.planning": ("forecast", "plan", "sweep"),
    "paceline.runs.running": ("Run", "rehearse", "train"),
    "paceline.codecs.codec": ("Codec",),
    "paceline.core.errors": (
        *("InvalidInput", "NonFinite", "PacelineError", "WorkerLost", "WorkersFailed"),
    ),
    "paceline.core.machine": ("Machine",),
    "paceline.core.settings": ("RehearseSettings", "TrainSettings"),
    "paceline.core.strategy": ("Strategy",),
    "paceline.core.timeline": ("Timeline",),
    "paceline.exchange.all_reduce": ("ddp_hook",),
    "paceline.exchange.local_updates": ("LocalUpdates",),
    "paceline.integrations.data_parallel": ("DataParallel",),
    "paceline.planner": ("Forecast", "Ranking"),
    "paceline.training.recipes.recipe": ("Recipe",),
    "paceline.records.result": ("PlanResult", "RunResult"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = [
    "Codec",
    "DataParallel",
    "Forecast",
    "InvalidInput",
    "LocalUpdates",
    "Machine",
    "NonFinite",
    "PacelineError",
    "PlanResult",
    "Ranking",
    "Recipe",
    "RehearseSettings",
    "Run",
    "RunResult",
    "Strategy",
    "Timeline",
    "TrainSettings",
    "WorkerLost",
    "WorkersFailed",
    "__version__",
    "ddp_hook",
    "forecast",
    "plan",
    "rehearse",
    "sweep",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # imported only if needed, because it takes long

        return globals().setdefault(name, version("paceline"))
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
