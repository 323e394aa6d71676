"""The body processes of a hub's own machine: started, watched, and ended."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.links.cores import physical_cores
from paceline.links.launch import KEEPING_MEMORY
from paceline.strategies.wheel.body import Post
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.fit import devices_of

_MODULE = "paceline.strategies.wheel.body"
_ENDING_S = 5.0
_STANDARD_ERROR = 2


@dataclass
class _Body:
    """A process, and whether it was heard of that it has ended."""

    post: Post
    process: subprocess.Popen[bytes]
    is_told: bool = False


class Crew:
    """A process for each device of a run, all on this machine. At its end none is left."""

    def __init__(
        self, address: str, run_id: str, config: Wheel, devices: Sequence[str], deadline_s: float
    ) -> None:
        self._bodies: list[_Body] = []
        lanes = devices_of(config)
        threads = threads_each(len(lanes))
        try:
            for device, workers in zip(devices, lanes.values(), strict=True):
                post = Post(
                    address=address,
                    run_id=run_id,
                    workers=tuple(workers),
                    device=device,
                    deadline_s=deadline_s,
                    threads=threads,
                    launcher=os.getpid(),
                )
                self._bodies.append(_Body(post, _start(post)))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> dict[int, tuple[int, ...]]:
        """The workers of each process."""
        return {body.process.pid: body.post.workers for body in self._bodies}

    def gone(self) -> list[tuple[int, str]]:
        """Return the workers whose process has ended before its work since the last call."""
        found: list[tuple[int, str]] = []
        for body in self._bodies:
            code = body.process.poll()
            if code and not body.is_told:
                body.is_told = True
                how = (
                    f"was ended by {signal.Signals(-code).name}"
                    if code < 0
                    else f"ended with exit code {code}"
                )
                why = f"(process {body.process.pid}) {how}"
                found += [(worker, why) for worker in body.post.workers]
        return found

    def leave(self) -> None:
        """Wait a moment for those that have done their work, and end the others."""
        self._end(_ENDING_S)

    def close(self) -> None:
        """End those that are left."""
        self._end(0)

    def _end(self, within_s: float) -> None:
        for body in self._bodies:
            try:
                body.process.wait(within_s)
            except subprocess.TimeoutExpired:
                body.process.kill()
                body.process.wait()


def threads_each(num_devices: int) -> int:
    """Return how many threads each of these devices, and the hub beside them, computes with."""
    return max(1, len(physical_cores(os.sched_getaffinity(0))) // (num_devices + 1))


def _start(post: Post) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-m", _MODULE, post.model_dump_json()],
        env=KEEPING_MEMORY | os.environ,
        stdin=subprocess.DEVNULL,
        stdout=_STANDARD_ERROR,  # standard output holds the result, and nothing else
    )
