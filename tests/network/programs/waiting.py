"""Write the rank's network namespace to the FIFO `networks` of a folder, then wait forever."""

import signal
import sys
from pathlib import Path

with (Path(sys.argv[1]) / "networks").open("a") as told:
    told.write(f"{Path('/proc/self/ns/net').readlink()}\n")
signal.pause()
