"""A policy of the user's in a whole run, on files of a published data set, beside another run."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from processes import Finished, Started

pytestmark = pytest.mark.slow

NUM_TRAIN, NUM_TEST, NUM_FEATURES = 49_749, 14_951, 300  # of w8a and w8a.t, as published
TRAIN = ("train", "mlp-300-16-2", "--strategy", "hogbatch", "--workers", "cpu:1,cpu:1", "--json")
QUICK = ("--profile-s", "0.2", "--force", "--epochs", "2", "--learning-rate", "0.05")
MODULE = '''
class Steps:
    """Eight samples, then sixteen, and so on up to 64: whatever the others do."""

    def __init__(self, workers):
        assert all(speed > 0 for speed in workers.speeds)
        self.most = [64 for spec in workers.specs]

    def next_batch(self, worker, updates, sizes):
        return min(2 * sizes[worker] or 8, 64)


class Late:
    """Too much, but not at once."""

    def __init__(self, workers):
        self.most = [64 for spec in workers.specs]
        self.asked = 0

    def next_batch(self, worker, updates, sizes):
        self.asked += 1
        return 8 if self.asked < 50 else 65
'''


def write_w8a(folder: Path) -> None:
    """Write both files as published: -1 or +1, about twelve ones a line, a space behind."""
    generator = np.random.default_rng(0)
    for name, count in (("w8a", NUM_TRAIN), ("w8a.t", NUM_TEST)):
        lines = []
        for row in generator.integers(1, NUM_FEATURES + 1, (count, 12)):
            ones = np.unique(row)
            label = "+1" if ones[0] < 20 else "-1"
            lines.append(f"{label} {' '.join(f'{one}:1' for one in ones)} \n")
        (folder / name).write_text("".join(lines))


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    (folder / "mine.py").write_text(MODULE)
    write_w8a(folder)
    return folder


def line(home: Path, *arguments: str) -> Finished:
    return Started([sys.executable, "-m", "paceline", *arguments], home).finish(240)


@pytest.fixture(scope="module")
def runs(home: Path) -> dict[str, dict]:
    found = {}
    for policy in ("mine:Steps", "adaptive"):
        done = line(home, *TRAIN, *QUICK, "--data", "w8a:.", "--policy", policy)
        assert done.code == 0, done.err
        found[policy] = json.loads(done.out)
    return found


def test_its_sizes_are_those_of_the_run(home: Path, runs):
    result = runs["mine:Steps"]
    assert result["config"]["policy"] == "mine:Steps"
    for worker in result["workers"]:
        sizes = [size for _, size in worker["batch_sizes"]]
        assert sizes[:4] == [8, 16, 32, 64]
        assert set(sizes) <= {8, 16, 32, 64} | set(range(1, 64))  # the last of an epoch is the rest
    assert sum(worker["samples"] for worker in result["workers"]) == 2 * NUM_TRAIN
    assert result["accuracy"] > 0.9
    page = (home / "runs" / result["id"] / "report.html").read_text()
    assert "policy mine:Steps" in page


def test_two_policies_stand_beside_each_other(home: Path, runs):
    folders = [f"runs/{result['id']}" for result in runs.values()]
    done = line(home, "compare", *folders, folders[0], "--json", "--page", "both.html")
    assert done.code == 0, done.err
    sides = json.loads(done.out)["runs"]
    assert ["policy mine:Steps" in side["differs"] for side in sides] == [True, False, True]
    assert all(sum(side["update_shares"].values()) == pytest.approx(1) for side in sides)
    assert 'id="figure-losses"' in (home / "both.html").read_text()


def test_a_bad_size_ends_the_run_in_one_line(home: Path):
    done = line(home, *TRAIN, *QUICK, "--data", "w8a:.", "--policy", "mine:Late")
    assert done.code == 2
    assert "a batch of 65; a whole number from 1 to its most, 64, is needed" in done.err
    assert "Traceback" not in done.err
