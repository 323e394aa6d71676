"""Run one part of the GPU measurements and save its figures.

    part.py MODULE FILE [--smoke]

calls the module's function `run` with a `Part`. SIGTERM ends the process after it has printed its
stack traces.
"""

import faulthandler
import json
import signal
import sys
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1])]
    sys.modules["part"] = sys.modules["__main__"]  # parts import Part from `part`

import torch
import torch.distributed as dist
from torch.utils import collect_env

from paceline.links.devices import Device, device_of, gpus
from paceline.measure.this_machine import facts


class PartFailedError(Exception):
    """Raised by a part that found a wrong result."""


class Part:
    """A running part, which writes each kept figure to its file at once.

    `smoke`: use tiny sizes to check that the part works; the figures are meaningless.
    """

    def __init__(self, path: Path, *, smoke: bool) -> None:
        self.smoke = smoke
        self.gpus = gpus()
        self._path = path
        self._figures: dict[str, Any] = {}
        self._summary: dict[str, str] = {}
        self._about = {
            "part": path.stem,
            "simulated": self.gpus[0].type != "cuda",
            "smoke": smoke,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": facts(self.gpus[0]) | {"num_gpus": len(self.gpus)},
            "versions": {
                "cuda": torch.version.cuda,
                "nccl": str(torch.cuda.nccl.version()) if dist.is_nccl_available() else None,
                "driver": collect_env.get_nvidia_driver_version(collect_env.run),
            },
        }
        self.write("unfinished")

    @property
    def device(self) -> Device:
        """The first GPU."""
        return device_of(self.gpus[0])

    def worlds(self) -> dict[str, tuple[int, int]]:
        """Return numbers of (ranks, GPUs): two ranks on one GPU, and a GPU per rank."""
        found = {"2 ranks on one GPU": (2, 1)}
        for count in sorted({min(2, len(self.gpus)), len(self.gpus)} - {1}):
            found[f"{count} ranks, a GPU each"] = count, count
        return found

    def keep(self, name: str, figures: Any, line: str) -> None:
        """Save figures under a name, with a line for the summary."""
        self._figures[name], self._summary[name] = figures, line
        print(f"{name}: {line}", flush=True)
        self.write("unfinished")

    def write(self, outcome: str, why: str | None = None) -> None:
        """Replace the file atomically, so that a killed process leaves a valid file."""
        found = {"summary": self._summary, "figures": self._figures}
        content = self._about | {"outcome": outcome, "why": why} | found
        beside = self._path.with_suffix(".tmp")
        beside.write_text(json.dumps(content, indent=2) + "\n")
        beside.replace(self._path)


def main() -> None:
    """Run the part named on the command line."""
    faulthandler.register(signal.SIGTERM, chain=True)
    module, file, *options = sys.argv[1:]
    part = Part(Path(file), smoke="--smoke" in options)
    try:
        import_module(module).run(part)
    except Exception as error:
        part.write("failed", f"{type(error).__name__}: {error}")
        raise
    part.write("done")


if __name__ == "__main__":
    main()
