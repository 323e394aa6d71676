"""Run a hub on the first host and a worker on the second, and cut off the worker.

cut_off.py KEYS SECONDS: rank 0 is the hub; rank 1 takes its interface down for SECONDS.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

PORT = 5555
BEFORE_NBYTES = 3_000_000  # cut off after a few dozen steps
ADDRESS = f"tcp://{os.environ['MASTER_ADDR']}:{PORT}"
INTERFACE = os.environ["GLOO_SOCKET_IFNAME"]
ALONE = {name: value for name, value in os.environ.items() if "RANK" not in name}  # not a rank
PACELINE = [sys.executable, "-m", "paceline"]
RUN = [
    *("lenet5", "--workers", "1", "--strategy-option", "lanes=1"),
    *("--strategy-option", "staleness=0", "--epochs", "6"),
]


def sent_nbytes() -> int:
    """Return the bytes that this host has sent through its interface."""
    return int(Path("/sys/class/net", INTERFACE, "statistics", "tx_bytes").read_text())


def link(state: str) -> None:
    subprocess.run(["ip", "link", "set", INTERFACE, state], check=True)


def hub(keys: str) -> int:
    words = ["--listen", ADDRESS, "--keys", keys, "--profile-s", "0", "--timeout", "60"]
    return subprocess.run([*PACELINE, "hub", *RUN, *words], env=ALONE, check=False).returncode


def worker(keys: str, seconds: float) -> int:
    words = ["--connect", ADDRESS, "--worker-ids", "0", "--keys", keys, *("--threads", "1")]
    words += ["--timeout", "60"]
    with subprocess.Popen([*PACELINE, "worker", *words], env=ALONE) as body:
        while sent_nbytes() < BEFORE_NBYTES and body.poll() is None:
            time.sleep(0.01)
        link("down")
        before = sent_nbytes()
        time.sleep(seconds)
        link("up")
        code = body.wait()
    print(json.dumps({"before": before, "after": sent_nbytes()}))
    return code


if __name__ == "__main__":
    keys, seconds = sys.argv[1], float(sys.argv[2])
    sys.exit(hub(keys) if os.environ["RANK"] == "0" else worker(keys, seconds))
