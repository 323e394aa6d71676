"""Load the C++ guard, which tells torch each thread's simulated device and stream.

The guard is compiled at its first use, so only processes that simulate GPUs require a C++ compiler.
The library is cached in the user's cache folder.
"""

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import torch

_SOURCE = Path(__file__).with_suffix(".cpp")
_COMPILE_S = 300.0
Record = Callable[[int, int], int]
Wait = Callable[[int, int, int], None]
_RECORD = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int, ctypes.c_int64)
_WAIT = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int, ctypes.c_int64)
_calls: list[object] = []  # Python callbacks that C++ calls, kept alive


@cache
def guard() -> ctypes.CDLL:
    """Load the library, which registers the guard with torch."""
    found = ctypes.CDLL(str(_compiled()))
    found.get_stream.restype = ctypes.c_int64
    found.set_stream.argtypes = [ctypes.c_int, ctypes.c_int64]
    return found


class DeviceModule:
    """The counterpart of the module `torch.cuda` for simulated devices."""

    device = staticmethod(lambda device: nullcontext())
    is_available = is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    device_count = staticmethod(lambda: guard().num_devices())
    current_device = staticmethod(lambda: guard().get_device())
    manual_seed_all = staticmethod(lambda seed: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])


def set_calls(record: Record, wait: Wait) -> None:
    """Set the functions with which torch records events and makes streams wait.

    `record(device, stream)` returns the number of a new event. `wait(event, device, stream)` makes
    the stream wait for the event. All arguments are numbers.
    """
    _calls[:] = _RECORD(record), _WAIT(wait)
    guard().set_calls(*_calls)


def _compiled() -> Path:
    """Return the path of the library; compile it if it is not cached for this torch version."""
    source = _SOURCE.read_bytes()
    digest = hashlib.sha256(source + torch.__version__.encode()).hexdigest()[:16]
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(cache_home) / "paceline" / f"simulated_guard-{digest}.so"
    if path.exists():
        return path
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Rename the finished library, because several processes may compile it concurrently.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        _compile(made)
        made.rename(path)
    return path


def _compile(target: Path) -> None:
    torch_folder = Path(torch.__file__).parent
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O1", "-shared", "-fPIC"]
    command += [f"-I{torch_folder / 'include'}", str(_SOURCE), "-o", str(target)]
    command += [f"-L{torch_folder / 'lib'}", "-lc10"]
    subprocess.run(command, check=True, timeout=_COMPILE_S)
