"""A plugin of pytest that names the running test to `in_all_processes`, and records its seconds."""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from in_all_processes import FOLDER, TEST


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run a test with its name in the environment."""
    os.environ[TEST] = item.nodeid
    sys.modules["in_all_processes"].take_context()
    begun = time.monotonic()
    done = yield
    with (Path(os.environ[FOLDER]) / "seconds.jsonl").open("a") as file:
        file.write(json.dumps([item.nodeid, round(time.monotonic() - begun, 3)]) + "\n")
    return done
