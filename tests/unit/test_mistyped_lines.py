"""Mistyped command lines: one line names the wrong word and the nearest right one."""

import pytest

from paceline.commands.app import run
from paceline.core.error_lines import TYPED, error_line
from paceline.core.errors import InvalidInput
from refusals import refused_field

HOST = ("train", "lenet5", "--strategy", "host")
# The word that the error names, the word that it suggests, and the command line.
LINES = [
    ("trian", "train", "trian", "lenet5"),
    ("--batchsize", "--batch-size", "train", "lenet5", "--batchsize", "64"),
    ("model", "lenet5", "plan", "lenet", "--machine", "8xv100"),
    ("--strategy", "host", "train", "lenet5", "--strategy", "hots"),
    ("--codec", "dynamic8", "train", "lenet5", "--codec", "dinamic8"),
    ("chnk", "chunk", *HOST, "--strategy-option", "chnk=2"),
    ("--optimizer", "adam", "train", "lenet5", "--optimizer", "adm"),
    ("--schedule", "cosine", "train", "lenet5", "--schedule", "cosin"),
    ("--machine", "k40-gigabit", "plan", "lenet5", "--machine", "k40-gigabt"),
    ("--kind", "'measured'", "scale", "lenet5", "--kind", "measurd"),
    ("--batch-size", "64k", "train", "lenet5", "--batch-size", "64k"),
    ("--timeout", "5m", "train", "lenet5", "--timeout", "5m"),
    ("--seconds", "", "probe", "--seconds", "5m"),
    # Options of other commands, options without their partner, and a missing argument.
    ("model", "", "plan"),
    ("--host", "", "train", "lenet5", "--host", "1"),
    ("--sweep", "--machine", "plan", "lenet5", "--sweep", "latency=1u:1m"),
    ("listen", "--listen", "hub", "lenet5"),
    ("10.0.0.1:5555", "tcp://", "hub", "lenet5", "--listen", "10.0.0.1:5555"),
    ("10.0.0.1", "tcp://", "worker", "--connect", "10.0.0.1"),
]


@pytest.mark.parametrize(("named", "nearest", "words"), [(a, b, words) for a, b, *words in LINES])
def test_the_error_of_a_mistyped_line_is_one_line(line, named, nearest, words):
    line(*words)
    assert (line.code, line.out, line.err.count("\n")) == (2, "", 1), line.err
    assert named in line.err
    assert nearest in line.err.replace(named, "", 1)


def test_an_error_that_a_worker_finds_names_the_option(capfd, monkeypatch):
    monkeypatch.setattr("sys.argv", ["paceline", "train", "lenet5", "--timeout=20", "--steps=3"])
    assert run() == 2
    assert refused_field(capfd.readouterr().err) == "steps"
    monkeypatch.setenv(TYPED, "--timeout --steps")
    assert error_line(InvalidInput("steps", "must be 5")) == "--steps must be 5"
    assert error_line(InvalidInput("deadline_s", "must be 5")) == "--timeout must be 5"
    assert error_line(InvalidInput("data", "is missing")) == "data is missing"
