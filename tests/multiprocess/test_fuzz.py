"""Every parser of a file or a frame takes what is valid, and refuses the rest in one clear line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parents[2] / "benchmarks" / "faults" / "fuzz.py"
GROUPS = {
    "machine,configuration,option,journal": (300, 0),
    "result,trace,report,compare": (300, 0),
    "libsvm,packed libsvm,multilabel,images,tokens": (300, 0),
    "checkpoint,checkpoint values,worker state": (300, 0),
    "frame,record,part,packet": (0, 4000),
}


@pytest.mark.parametrize("names", GROUPS)
def test_changed_inputs_are_taken_whole_or_refused_in_one_line(names: str, tmp_path: Path):
    """An input is known by the seed and its number: `fuzz.py --seed 7 --only NUMBER`."""
    files, frames = GROUPS[names]
    output = tmp_path / "counts.json"
    numbers = ("--files", str(files), "--frames", str(frames), "--seed", "7")
    done = subprocess.run(
        [sys.executable, FUZZ, "--parsers", names, *numbers, "--output", output],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(output.read_text())["parsers"]
    assert [row["parser"] for row in rows] == names.split(",")
    for row in rows:
        # One that is always refused, or never, looks at nothing.
        assert row["accepted"] > 0
        assert row["refused"] > 0
        assert row["tried"] == row["accepted"] + row["refused"]


BROKEN = """
import sys
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [{faults!r}, {tests!r}]
from fuzzing import child, records

pytestmark = pytest.mark.slow

def broken(data, folder):
    if len(data) % 5 == 1:
        {fault}
    return data

parser = replace(records.PARSERS[2], parse=broken, seeds=lambda folder: [b"x" * 100])
child.parser_of = lambda name: parser
child.CPU_S = 0.2
child.main("option", 1, 0, 200, int(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("fault", "end"),
    [
        ("raise KeyError(data)", "crashed"),
        ("while True: pass", "exit -27"),  # SIGPROF
        ("bytearray(2**33)", "MemoryError"),
        ("return None", "unclear"),
    ],
)
def test_the_fuzzer_finds_what_is_broken(fault: str, end: str, tmp_path: Path):
    tests = FUZZ.parents[2] / "tests"
    program = BROKEN.format(faults=str(FUZZ.parent), tests=str(tests), fault=fault)
    progress = tmp_path / "progress"
    progress.write_bytes(bytes(8))
    with progress.open("r+b") as file:
        done = subprocess.run(
            [sys.executable, "-c", program, str(file.fileno())],
            capture_output=True,
            text=True,
            pass_fds=(file.fileno(),),
            timeout=600,
            check=False,
        )
    assert end in f"{done.stdout} exit {done.returncode}", done.stderr
