"""Programs of tests that run as several ranks of this machine."""

from collections.abc import Callable

from processes import Finished

LAUNCH = """
import sys
from paceline.links.launch import launch
launch([sys.executable, *sys.argv[2:]], int(sys.argv[1]))
"""

# What torch's process group on CPUs does now and then: one of its threads, which frees the tensors
# of the last collective, finds that Python is ending, and aborts a rank that is done.
TORCH_FAILED = "terminate called without an active exception"
ATTEMPTS = 3


def succeeded(run: Callable[[], Finished]) -> Finished:
    """Return what came of a run, which must succeed; one in which torch failed is made again."""
    for _ in range(ATTEMPTS):
        done = run()
        if done.code == 0 or TORCH_FAILED not in done.err:
            break
    assert done.code == 0, done.err[-5000:]
    return done
