"""Describe the K40c of Du et al. 2017 with the hand-over time that `papers.wheel` calibrates."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from papers.wheel import Runs

_FILE = Path(__file__).parents[2] / "machines" / "k40-gigabit.toml"
_CALL = re.compile(r"^call_latency_s = .*$", re.MULTILINE)


@contextmanager
def device() -> Iterator[str]:
    """Yield a device of a temporary machine file with the calibrated hand-over time."""
    sync_s = Runs.calibrated().machine.devices[0].sync_latency_s or 0.0
    with TemporaryDirectory() as folder:
        path = Path(folder) / _FILE.name
        added = rf'\g<0>\nsync_latency_s = "{1e6 * sync_s:.6f} us"'
        path.write_text(_CALL.sub(added, _FILE.read_text()))
        yield f"{path}:gpu0"
