"""The dependency rule, as it is when the modules are really imported."""

import subprocess
import sys

import pytest

BLOCKED = """
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""

PURE = {
    "paceline": ["codecs", "planner"],
    "paceline.core": [
        *("advice", "breakdown", "calibration", "chunks", "collective", "compare", "cost"),
        *("errors", "insight", "machine", "memory", "plan", "simulate", "step", "strategy"),
        *("timeline", "transfer", "units", "wire_format", "workload"),
    ],
    "paceline.strategies": [
        *("allreduce.config", "allreduce.plan"),
        *("host.config", "host.model", "host.plan"),
        *("tree.config", "tree.plan"),
    ],
    "paceline.record": ["trace"],
    "paceline.report": ["differences", "page"],
    "paceline.data": ["balanced", "sampler"],
    "paceline.probe": ["text"],
    "paceline.scaling": ["findings", "insights", "journal", "remaining", "runs", "steps"],
    "paceline.wire": ["client", "service"],
}


@pytest.mark.parametrize("package", PURE)
def test_what_plans_does_not_import_torch(package: str):
    modules = [f"{package}.{name}" for name in PURE[package]]
    subprocess.run([sys.executable, "-c", BLOCKED, *modules], check=True, timeout=60)


def test_the_block_works():
    command = [sys.executable, "-c", BLOCKED, "paceline.links.group"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "torch is blocked" in done.stderr


def test_importing_paceline_starts_nothing():
    code = (
        "import paceline, sys, threading; print('torch' in sys.modules, threading.active_count())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["False", "1"]
