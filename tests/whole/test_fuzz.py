"""Every parser of a file or a frame takes what is valid, and refuses the rest in one clear line."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "faults"))

import lies
from fuzzing.all_parsers import NAMES, parser_of
from fuzzing.child import verdict

FUZZ = Path(__file__).parents[2] / "benchmarks" / "faults" / "fuzz.py"
SEED, NUM_QUICK, NUM_MORE = 7, 40, 400


@pytest.mark.parametrize("count", [NUM_QUICK, pytest.param(NUM_MORE, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_changed_inputs_are_taken_or_refused_in_one_line(name: str, count: int, tmp_path: Path):
    parser, folder = parser_of(name), tmp_path / "input"
    folder.mkdir()
    seeds, found = parser.seeds(tmp_path), set()
    for number in range(count):
        what, text = verdict(parser, parser.input(seeds, SEED, number), folder)
        assert what == "accepted" or (what == "refused" and number >= len(seeds)), text
        found.add(what)
    # One that is always refused, or never, looks at nothing.
    assert len(found) == 2 or count == NUM_QUICK


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
        command = [sys.executable, "-c", program, str(file.fileno())]
        descriptors = (file.fileno(),)
        done = subprocess.run(command, capture_output=True, text=True, pass_fds=descriptors)
    assert end in f"{done.stdout} exit {done.returncode}", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("strategy", lies.STRATEGIES)
def test_honest_workers_end_with_a_result_whatever_three_others_say(strategy: str) -> None:
    """Who have the keys, and lie."""
    found = lies.run(strategy, seed=7, lies=True, epochs=12)
    assert not found.faults
    assert found.lies
