"""Settings of processes that connect to a hub, with the help texts of the command line."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from paceline.core.settings import Record, Seconds

RUN = "paceline"  # default name of a run


def _numbers(text: Any) -> Any:
    """Parse comma-separated worker numbers, such as 2,3."""
    if not isinstance(text, str):
        return text
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not 0 <= min(found) <= max(found) < 2**32 or len(set(found)) < len(found):
        raise ValueError(f"must be distinct worker numbers, such as 0,1, not {text!r}")
    return found


Numbers = Annotated[tuple[int, ...], BeforeValidator(_numbers)]


class ConnectingWorkers(Record, ABC):
    """Base of the settings of a process that connects one or more workers to a hub."""

    connect: str = Field(description="Address of the hub, such as tcp://10.0.0.1:5555.")
    keys: Path | None = Field(None, description="Folder of keys that `paceline keys` has written.")
    run_name: str = Field(RUN, description="Name of the run; must be equal at hub and workers.")
    deadline_s: Seconds = Field(
        60.0, description="Time without an answer from the hub after which this process gives up."
    )

    @property
    @abstractmethod
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the workers in this process."""


class WorkerProcessSettings(ConnectingWorkers):
    """Settings of `paceline worker`, and of the worker processes that a hub starts."""

    workers: Numbers = Field(
        (0, 1), description="Which workers this process runs, by their numbers."
    )
    device: str | None = Field(
        None, description="Device, such as cpu or cuda:0. Default: a GPU if there is one."
    )
    threads: int = Field(0, ge=0, description="Number of CPU threads; 0: torch chooses.")

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the workers that this process runs."""
        return self.workers
