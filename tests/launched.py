"""Launch test programs as several ranks on this machine."""

from collections.abc import Callable

from processes import Finished

LAUNCH = """
import sys
from paceline.links.launch import launch
from paceline.links.processes import module_command
launch(module_command(*sys.argv[2:]), int(sys.argv[1]))
"""

# Output of a rare failure in torch's process group on CPUs: while Python exits, a thread that frees
# tensors of the last collective aborts a rank that has already finished.
TORCH_FAILED = "terminate called without an active exception"
ATTEMPTS = 3


def succeeded(run: Callable[[], Finished]) -> Finished:
    """Return the result of a successful run; repeat a run with TORCH_FAILED."""
    for _ in range(ATTEMPTS):
        done = run()
        if done.code == 0 or TORCH_FAILED not in done.err:
            break
    assert done.code == 0, done.err[-5000:]
    return done
