"""Actual imports follow the dependency rule."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from processes import DEADLINE_S

BLOCKED = """
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
"""
PACKAGE = Path(__file__).parents[1] / "src" / "paceline"
PURE = {
    "paceline": ["planner"],
    "paceline.core": [path.stem for path in (PACKAGE / "core").glob("[a-z]*.py")],
    "paceline.planner": [path.stem for path in (PACKAGE / "planner").glob("[a-z]*.py")],
    "paceline.strategies": [
        f"{name}.{part}" for name in ("allreduce", "host", "tree") for part in ("config", "plan")
    ],
    "paceline.record": ["trace"],
    "paceline.report": ["comparison", "plans"],
    "paceline.records": ["built_in", "config_file", "machine_file"],
    "paceline.runs": ["planning"],
    "paceline.studies.scale": ["journal", "study_runs"],
    "paceline.rpc": ["client", "server"],
}


def python(code: str, *options: str, **how: object) -> str:
    """Run a program in a new process without errors, and return its output."""
    command = [sys.executable, *options, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, **how)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_modules_for_planning_do_not_import_torch():
    modules = [f"{package}.{name}" for package, names in PURE.items() for name in names]
    python(
        f"{BLOCKED}\n"
        f"for name in {modules}: importlib.import_module(name)\n"
        "try: importlib.import_module('paceline.links.group')\n"
        "except ImportError as error: assert 'torch is blocked' in str(error)\n"
        "else: raise AssertionError('nothing is blocked')\n"
    )


def test_plans_of_built_in_models_do_without_torch():
    """Importing torch would take longer than planning."""
    found = python(
        f"{BLOCKED}\n"
        "from paceline.commands.app import run\n"
        "for more in ([], ['--sweep', 'bandwidth=1G:10G'], ['--measured', '30/s']):\n"
        "    sys.argv = ['', 'plan', 'lenet5', '--machine', 'two-hosts-gigabit', *more]\n"
        "    sys.argv += ['--strategy', 'allreduce,wheel']\n"
        "    assert run() == 0\n"
    )
    assert found.count("lenet5") >= 3


@pytest.mark.slow
def test_importing_starts_no_threads_or_devices_and_offers_the_documented_names():
    names = "get, EightBit, FourBit, OneBit, Threshold, ErrorFeedback, Cast, Codec, Payload"
    python(
        "import paceline, sys, threading\n"
        "assert 'torch' not in sys.modules\n"
        f"from paceline.codecs import {names}\n"
        "assert get('onebit').name == ErrorFeedback(OneBit()).name\n"
        "assert all(hasattr(paceline.codecs, name) for name in paceline.codecs.__all__)\n"
        "import paceline.training.models, torch\n"
        "assert threading.active_count() == 1\n"
        "assert not torch.cuda.is_initialized()\n"
    )


def test_modules_next_to_the_project_cannot_be_imported(tmp_path):
    found = python("import json, sys; print(json.dumps(sys.path))", "-P", cwd=tmp_path, env={})
    folders = {Path(entry).resolve() for entry in json.loads(found)}
    root = Path(__file__).parents[1]
    assert not folders & {root, *root.parents}
