"""Each parser of files or frames accepts valid input and refuses other input in one line."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, seed, settings

FAULTS = Path(__file__).parents[2] / "benchmarks" / "faults"
sys.path += [str(FAULTS), str(FAULTS.parent)]

import fuzz  # noqa: E402
import lies  # noqa: E402

SEED, NUM_QUICK, NUM_MORE = 7, 40, 400


@pytest.mark.parametrize("count", [NUM_QUICK, pytest.param(NUM_MORE, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", fuzz.PARSERS)
def test_changed_inputs_are_accepted_or_refused_in_one_line(name: str, count: int, tmp_path: Path):
    parser, folder = fuzz.PARSERS[name], tmp_path / "input"
    folder.mkdir()
    seeds = parser.seeds(tmp_path)
    found = {parser.verdict(data, folder)[0] for data in seeds}
    assert found == {"accepted"}

    @seed(SEED)
    @settings(
        max_examples=count, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(parser.inputs(seeds))
    def parsed(data: bytes) -> None:
        what, text = parser.verdict(data, folder)
        assert what in ("accepted", "refused"), text
        found.add(what)

    parsed()
    # A parser that never refuses a changed input checks nothing.
    assert len(found) == 2 or count == NUM_QUICK


BROKEN = """
import sys
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [{faults!r}, {benchmarks!r}, {tests!r}]
import fuzz
from fuzzing import wire

def broken(data, folder):
    if len(data) % 5 == 1:
        {fault}
    return data

parser = replace(wire.PARSERS[2], parse=broken, seeds=lambda folder: [b"x" * 100])
fuzz.PARSERS["part"] = parser
fuzz.CPU_S = 0.2
fuzz.main("part", 1, 200, Path(sys.argv[1]))
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
def test_the_fuzzer_detects_each_kind_of_fault(fault: str, end: str, tmp_path: Path):
    tests = Path(__file__).parents[1]
    program = BROKEN.format(
        faults=str(FAULTS), benchmarks=str(FAULTS.parent), tests=str(tests), fault=fault
    )
    command = [sys.executable, "-c", program, str(tmp_path / "at-work")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert end in f"{done.stdout} exit {done.returncode}", done.stderr
    assert (tmp_path / "at-work").exists()


@pytest.mark.slow
def test_honest_workers_finish_beside_three_malicious_ones() -> None:
    """The malicious workers have valid keys and send false messages."""
    found = lies.run(seed=7, lies=True, epochs=12)
    assert not found["faults"]
    assert found["lies"]
