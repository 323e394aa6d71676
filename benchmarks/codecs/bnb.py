"""Import bitsandbytes for comparisons, if it is installed."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

_TARGET = "build/bitsandbytes"
_REQUIREMENTS = "benchmarks/codecs/requirements.txt"


@cache
def functional() -> Any:
    """Return bitsandbytes.functional; print a message and return None if not installed."""
    if find_spec("bitsandbytes") is None:
        print(
            "bitsandbytes is left out, because it is not installed: "
            f"pip install --no-deps --target {_TARGET} -r {_REQUIREMENTS}",
            flush=True,
        )
        return None
    return import_module("bitsandbytes.functional")
