"""Build hosts, fork a process that outlives them, and close them."""

import os
import signal
import sys

sys.path.insert(0, sys.argv[1])

from hosts import TwoHosts

with TwoHosts(rate=None):
    child = os.fork()
    if not child:
        signal.pause()
print("closed")
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
