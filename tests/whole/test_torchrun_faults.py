"""A rank of torchrun that is killed: the others say so and end, and nothing is left."""

import os
import signal
from pathlib import Path

import pytest

from processes import Started, is_running

pytestmark = pytest.mark.slow

TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
# gloo does not always notice at once that a peer is gone, and torchrun kills 30 s after SIGTERM:
# the deadline, after which a rank notices for sure, is shorter.
DEADLINE = ("--deadline-s", "15")
TRAIN = ("-m", "paceline", "train", "lenet5", *DEADLINE, "--profile-s", "0.2", "--epochs", "1000")


@pytest.fixture
def training(start):
    """Start ranks that would train for minutes; afterwards none of them may be left."""
    found: dict[int, int] = {}

    def begin(num_ranks: int) -> tuple[Started, dict[int, int]]:
        run = start(*TORCHRUN, "--nproc-per-node", str(num_ranks), *TRAIN)
        lines = iter(run.process.stderr.readline, "")
        assert any(line.startswith("epoch 1/") for line in lines)
        found.update(ranks(run.process.pid))
        return run, found

    yield begin
    left = [pid for pid in found.values() if is_running(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def ranks(torchrun: int) -> dict[int, int]:
    """The process number of each rank; torchrun gives each a process group of its own."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            environment = (stat.parent / "environ").read_text().split("\0")
        except OSError:
            continue
        names = dict(entry.partition("=")[::2] for entry in environment)
        if parent == torchrun and "RANK" in names:
            found[int(names["RANK"])] = int(stat.parent.name)
    return found


def test_every_other_rank_says_in_one_line_which_one_died(training):
    run, pids = training(3)
    assert sorted(pids) == [0, 1, 2]
    victim, survivors = 0, (1, 2)
    # torchrun ends all ranks when it sees that one is gone, here before the others can notice.
    for rank in survivors:
        os.kill(pids[rank], signal.SIGSTOP)
    os.kill(pids[victim], signal.SIGKILL)
    told = (line for line in iter(run.process.stderr.readline, "") if "signal SIGTERM" in line)
    for _ in survivors:
        next(told)
    for rank in survivors:
        os.kill(pids[rank], signal.SIGCONT)
    done = run.finish()
    assert done.code != 0
    assert not any(is_running(pid) for pid in pids.values())
    lines = sorted(line for line in done.err.splitlines() if line.startswith("paceline: "))
    assert len(lines) == len(survivors), done.err
    for rank, line in zip(survivors, lines, strict=True):
        assert line.startswith(f"paceline: worker {rank} stops: ")
        assert f"worker {victim} (process {pids[victim]})" in line
        assert line.endswith("died in the middle of the run")
    # The only traceback is torchrun's own, and no survivor is aborted.
    assert done.err.count("Traceback (most recent call last)") == 1
    assert "SIGABRT" not in done.err


def test_no_rank_ends_before_the_first_to_fail_has_said_why(start):
    """torchrun kills the others at the first rank's end, and with them what they have to say."""
    program = Path(__file__).parents[1] / "multiprocess" / "programs" / "slow_to_report.py"
    module = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = start(*module, str(program)).finish(120)
    assert done.code != 0
    assert done.err.count("paceline: the same on all ranks") == 1, done.err
