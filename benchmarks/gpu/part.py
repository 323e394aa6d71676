"""One part of the evidence, as its module sees it: where to run, how much, and what is kept."""

import json
import shutil
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.links.devices import Device, device_of, gpus
from paceline.links.processes import output
from paceline.measure.this_machine import facts

_DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
_DRIVER_S = 20.0
_PACKAGES = ("triton", "bitsandbytes", "numpy", "pytest")


class PartFailedError(Exception):
    """A part was measured, and what it found is wrong."""


class Part:
    """A part that is running: its file has what it has kept, whatever happens to it later.

    `smoke`: only show that everything works, with tiny sizes; the figures mean nothing.
    """

    def __init__(self, path: Path, *, smoke: bool) -> None:
        self.smoke = smoke
        self.gpus = gpus()
        self._path = path
        self._figures: dict[str, Any] = {}
        self._summary: dict[str, str] = {}
        self._about = self._described()
        self._write("unfinished", None)

    @property
    def device(self) -> Device:
        """The first GPU."""
        return device_of(self.gpus[0])

    def worlds(self) -> dict[str, tuple[int, int]]:
        """Return numbers of ranks and of GPUs to compare on: on one GPU, and on all there are."""
        found = {"2 ranks on one GPU": (2, 1)}
        for count in sorted({min(2, len(self.gpus)), len(self.gpus)} - {1}):
            found[f"{count} ranks, a GPU each"] = count, count
        return found

    def keep(self, name: str, figures: Any, line: str) -> None:
        """Write figures to the file, with the line that the summary shows of them."""
        self._figures[name], self._summary[name] = figures, line
        print(f"{name}: {line}", flush=True)
        self._write("unfinished", None)

    def end(self, error: Exception | None) -> None:
        """Write how the part has ended."""
        self._write("done" if error is None else "failed", error)

    def _described(self) -> dict[str, Any]:
        return {
            "part": self._path.stem,
            "simulated": self.gpus[0].type != "cuda",
            "smoke": self.smoke,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": facts(self.gpus[0]) | {"num_gpus": len(self.gpus)},
            "versions": _versions(),
        }

    def _write(self, outcome: str, error: Exception | None) -> None:
        why = None if error is None else f"{type(error).__name__}: {error}"
        content = self._about | {
            "outcome": outcome,
            "why": why,
            "summary": self._summary,
            "figures": self._figures,
        }
        write(self._path, content)


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a part's file in one piece: a process that is killed leaves the file before."""
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(content, indent=2) + "\n")
    beside.replace(path)


def _versions() -> dict[str, str | None]:
    nccl = torch.cuda.nccl.version() if dist.is_nccl_available() else None
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": None if nccl is None else ".".join(map(str, nccl)),
        "driver": _driver(),
        **{name: _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    program = shutil.which(_DRIVER[0])
    if program is None:
        return None
    done = output([program, *_DRIVER[1:]], _DRIVER_S)
    return done.stdout.split("\n")[0].strip() if done.returncode == 0 else None
