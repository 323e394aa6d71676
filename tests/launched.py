"""Programs of tests that run as several ranks of this machine."""

from collections.abc import Callable

from processes import Finished

LAUNCH = """
import sys
from paceline.links.launch import launch
launch([sys.executable, *sys.argv[2:]], int(sys.argv[1]))
"""

# What torch's process group on CPUs does now and then: a rank that leaves the group at once breaks
# a connection that another one still makes (see pair.joined); and one of its threads, which frees
# the tensors of the last collective, finds that Python is ending, and aborts a rank that is done.
TORCH_FAILED = ("Gloo connectFullMesh failed", "terminate called without an active exception")
ATTEMPTS = 3


def succeeded(run: Callable[[], Finished]) -> Finished:
    """Return what came of a run, which must succeed; one in which torch failed is made again."""
    for _ in range(ATTEMPTS):
        done = run()
        if done.code == 0 or not any(words in done.err for words in TORCH_FAILED):
            break
    assert done.code == 0, done.err[-5000:]
    return done
