"""The dependency rule, as it is when the modules are really imported."""

import subprocess
import sys
from pathlib import Path

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

PACKAGE = Path(__file__).parents[1] / "src" / "paceline"
PURE = {
    "paceline": ["codecs", "planner"],
    "paceline.core": [path.stem for path in (PACKAGE / "core").glob("[a-z]*.py")],
    "paceline.planner": [path.stem for path in (PACKAGE / "planner").glob("[a-z]*.py")],
    "paceline.strategies": [
        *("allreduce.config", "allreduce.plan"),
        *("host.config", "host.plan"),
        *("tree.config", "tree.plan"),
    ],
    "paceline.record": ["trace"],
    "paceline.report": ["differences", "page"],
    "paceline.data": ["sampler"],
    "paceline.records": ["built_in", "config_file", "machine_file"],
    "paceline.api": ["planning"],
    "paceline.studies.scale": [
        "conclusions",
        "journal",
        "study_runs",
        "study_terminal",
    ],
    "paceline.rpc": ["client", "server"],
}


@pytest.mark.parametrize("package", PURE)
def test_what_plans_does_not_import_torch(package: str):
    modules = [f"{package}.{name}" for name in PURE[package]]
    subprocess.run([sys.executable, "-c", BLOCKED, *modules], check=True, timeout=600)


def test_what_the_documentation_names_is_found_without_importing_torch_before():
    names = "get, EightBit, FourBit, OneBit, Threshold, ErrorFeedback, Cast, Codec, Payload"
    code = (
        "import sys, paceline.codecs; assert 'torch' not in sys.modules; "
        f"from paceline.codecs import {names}; "
        "assert get('onebit').name == ErrorFeedback(OneBit()).name; "
        "assert all(hasattr(paceline.codecs, name) for name in paceline.codecs.__all__)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_the_block_works():
    command = [sys.executable, "-c", BLOCKED, "paceline.links.group"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert "torch is blocked" in done.stderr


PLANNED = BLOCKED.partition("for name")[0] + "from paceline.cli import main; main()"


@pytest.mark.parametrize("more", [(), ("--sweep", "bandwidth=1G:10G"), ("--measured", "30/s")])
def test_a_plan_of_a_built_in_model_does_without_torch(more: tuple[str, ...]):
    """Importing torch takes longer than planning does."""
    command = ["plan", "alexnet", "--machine", "two-hosts-gigabit", *more]
    done = subprocess.run(
        [sys.executable, "-c", PLANNED, *command],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "alexnet predicted on two-hosts-gigabit" in done.stdout


def test_importing_paceline_starts_nothing():
    code = (
        "import paceline, sys, threading; print('torch' in sys.modules, threading.active_count())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True
    )
    assert done.stdout.split() == ["False", "1"]
