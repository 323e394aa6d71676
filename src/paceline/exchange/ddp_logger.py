"""Replace DistributedDataParallel's C++ logger, which works only with torch's C++ reducer."""

from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class DDPLogger:
    """Implements the methods of torch's logger that DistributedDataParallel calls."""

    def __init__(self) -> None:
        self._data: dict[str, Any] = {"iteration": 0, "has_error": 0}

    def set_runtime_stats_and_log(self) -> None:
        """Count a forward pass whose gradients will be exchanged."""
        self._data["iteration"] += 1

    def set_error_and_log(self, error: str) -> None:
        """Store the last error, which `data` returns."""
        self._data |= {"has_error": 1, "error": error}

    def _set_uneven_input_join(self) -> None:
        self._data["join_uneven_inputs"] = True

    def _set_static_graph(self) -> None:
        self._data["static_graph"] = True

    def data(self, parallel: DistributedDataParallel) -> dict[str, Any]:
        """Return the wrapped module's class, the ranks and the counters, under torch's names."""
        group = parallel.process_group
        return {
            "module_name": type(parallel.module).__name__,
            "rank": group.rank(),
            "world_size": group.size(),
            "backend_name": dist.get_backend(group) if dist.is_initialized() else "",
            **self._data,
        }
