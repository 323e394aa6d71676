import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.native import die_with_parent, instruction_sets

CHILD = """
import os, signal, sys
from paceline.native import die_with_parent
die_with_parent({parent})
print(os.getpid(), flush=True)
signal.pause()
"""
PARENT = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1].replace("{parent}", str(os.getpid()))])
signal.pause()
"""


def test_a_child_is_killed_when_its_parent_is_killed():
    command = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert int(parent.stdout.readline()) != parent.pid
        parent.send_signal(signal.SIGKILL)  # which no process can answer to
        assert parent.stdout.read() == ""  # it ends when the child, which has it too, is gone


def test_a_child_whose_parent_is_gone_already_dies_at_once():
    code = CHILD.replace("{parent}", str(os.getppid()))  # not this process, its parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
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
