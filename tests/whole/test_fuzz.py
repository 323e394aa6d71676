"""Every parser of a file or a frame takes what is valid, and refuses the rest in one clear line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "faults"))

from fuzzing.all_parsers import NAMES, parser_of
from fuzzing.child import verdict

FUZZ = Path(__file__).parents[2] / "benchmarks" / "faults" / "fuzz.py"
NUM_QUICK, SEED = 40, 7
GROUPS = {
    "machine,configuration,option,journal": (300, 0),
    "result,trace,report,compare": (300, 0),
    "libsvm,packed libsvm,multilabel,images,tokens": (300, 0),
    "checkpoint,checkpoint values,worker state": (300, 0),
    "frame,record,part,packet": (0, 4000),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_few_changed_inputs_are_taken_or_refused_in_one_line(name: str, tmp_path: Path):
    parser, folder = parser_of(name), tmp_path / "input"
    folder.mkdir()
    seeds = parser.seeds(tmp_path)
    for number in range(NUM_QUICK):
        what, text = verdict(parser, parser.input(seeds, SEED, number), folder)
        assert what == "accepted" or (what == "refused" and number >= len(seeds)), text


def ran(*command: Any, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        **more,
    )


@pytest.mark.slow
@pytest.mark.parametrize("names", GROUPS)
def test_changed_inputs_are_taken_whole_or_refused_in_one_line(names: str, tmp_path: Path):
    """An input is known by the seed and its number: `fuzz.py --seed 7 --only NUMBER`."""
    files, frames = GROUPS[names]
    output = tmp_path / "counts.json"
    numbers = ("--files", files, "--frames", frames, "--seed", SEED)
    done = ran(FUZZ, "--parsers", names, *numbers, "--output", output)
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

def broken(data, folder):
    if len(data) % 5 == 1:
        {fault}
    return data

parser = replace(records.PARSERS[2], parse=broken, seeds=lambda folder: [b"x" * 100])
child.parser_of = lambda name: parser
child.CPU_S = 0.2
child.main("option", 1, 0, 200, int(sys.argv[1]))
"""


@pytest.mark.slow
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
        done = ran("-c", program, file.fileno(), pass_fds=(file.fileno(),))
    assert end in f"{done.stdout} exit {done.returncode}", done.stderr
