"""A rank that tells the name of its network in the FIFO `networks` of a folder, and never ends."""

import signal
import sys
from pathlib import Path

with (Path(sys.argv[1]) / "networks").open("a") as told:
    told.write(f"{Path('/proc/self/ns/net').readlink()}\n")
signal.pause()
