"""Run one worker of an elastic run; the first host also runs the lighthouse."""

import os
import subprocess
import sys
import time
from pathlib import Path

LIGHTHOUSE = "10.77.0.1:29510"
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
number = os.environ["RANK"]
own = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
done = Path("second host is done")
program = Path(sys.executable).with_name("torchft_lighthouse")
lighthouse = None
if number == "0":
    lighthouse = subprocess.Popen([program, "--bind", LIGHTHOUSE, "--min_replicas", "2"], env=own)
train = [sys.executable, "-m", "paceline", "train", "small_recipes:with_dropout", "--json"]
train += ["--strategy", "local", "--elastic", "--strategy-option", "sync_every=5"]
train += ["--strategy-option", f"lighthouse=http://{LIGHTHOUSE}"]
train += ["--strategy-option", f"worker_ids={number}", "--workers", "2"]
train += ["--batch-size", "16", "--steps", "40"]
code = subprocess.run([*train, "--output", f"runs{number}"], env=own, check=False).returncode
if lighthouse is None:
    done.touch()
else:
    while not done.exists():  # the test has a deadline
        time.sleep(0.1)
    lighthouse.kill()
    lighthouse.wait()
sys.exit(code)
