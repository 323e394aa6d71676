"""Train PyTorch models in parallel on uneven hardware, and predict the gain beforehand.

Importing `paceline` touches no device, starts no thread, and does not import torch.
"""

import sys
from typing import TYPE_CHECKING, Any

if sys.platform != "linux":
    raise ImportError(
        f"Paceline runs only on Linux (it uses futexes and memfd); this system is {sys.platform}. "
        "On Windows, install Paceline in WSL 2; on macOS, in a Linux container."
    )

# Imported after the check, so that other systems get the error above, not an import error.
from paceline.core.importing import lazily

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
_attribute = lazily(
    __name__,
    {
        "runs.planning": ("forecast", "plan", "sweep"),
        "runs.running": ("Run", "rehearse", "train"),
        "codecs.codec": ("Codec",),
        "core.errors": (
            *("InvalidInput", "NonFinite", "PacelineError", "WorkerLost", "WorkersFailed"),
        ),
        "core.machine": ("Machine",),
        "core.settings": ("RehearseSettings", "TrainSettings"),
        "core.strategy": ("Strategy",),
        "core.timeline": ("Timeline",),
        "exchange.all_reduce": ("ddp_hook",),
        "exchange.local_updates": ("LocalUpdates",),
        "integrations.data_parallel": ("DataParallel",),
        "planner": ("Forecast", "Ranking"),
        "training.recipes.recipe": ("Recipe",),
        "records.result": ("PlanResult", "RunResult"),
    },
)
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
    return _attribute(name)
