import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.native import die_with_parent, instruction_sets
from processes import is_running

CHILD = """
import os, sys, time
from paceline.native import die_with_parent
die_with_parent({parent})
print("alive", os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1].replace("{parent}", str(os.getpid()))])
time.sleep(60)
"""


def test_a_child_is_killed_when_its_parent_is_killed():
    command = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        word, pid = parent.stdout.readline().split()
        assert word == "alive"
        assert is_running(int(pid))
        parent.send_signal(signal.SIGKILL)  # which no process can answer to
        deadline = time.monotonic() + 60
        while is_running(int(pid)):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_child_whose_parent_is_gone_already_dies_at_once():
    code = CHILD.replace("{parent}", str(os.getppid()))  # not this process, its parent
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


def test_a_process_number_must_be_one():
    with pytest.raises(TypeError):
        die_with_parent("1")


def test_instruction_sets_are_those_that_the_kernel_lists():
    flags = {
        flag
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("flags")
        for flag in line.split(":")[1].split()
    }
    known = ["avx2", "fma", "avx512f", "avx512bw"]
    assert instruction_sets() == [name for name in known if name in flags]
