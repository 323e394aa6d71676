"""The commands in the guides are valid: options exist, plans and settings are accepted."""

import re
import shlex
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest

from command_line import Line
from paceline.commands import running
from paceline.commands.app import COMMANDS as KNOWN
from paceline.commands.app import loaded
from paceline.runs import launching

# Options of sbatch and patterns of their values, written by hand: Slurm has no parser to call.
SBATCH = {
    "job-name": r"[\w-]+",
    "nodes": r"\d+",
    "ntasks-per-node": r"\d+",
    "gpus-per-node": r"(\w+:)?\d+",
    "time": r"\d+:\d\d:\d\d",
    "signal": r"TERM@\d+",
    "output": r"%x-%j\.out",
}
DOCS = Path(__file__).parents[2] / "docs"
LAUNCH = sorted((DOCS / "launch").glob("*.md"))
GUIDES = [*sorted((DOCS / "how-to").glob("*.md")), *LAUNCH]
WHICH = (DOCS / "how-to" / "which-command.md").read_text()


def words_of(command: str) -> list[list[str]]:
    """Return the arguments of a paceline command, which srun or torchrun may start."""
    started = re.sub(r"^(srun .* )?torchrun .* -m ", "", command.partition(" > ")[0])
    return [shlex.split(started)[1:]] if re.match(r"paceline [a-z]+( |$)", started) else []


def commands() -> list[list[str]]:
    """Return the arguments of each command in the guides' code blocks and inline code."""
    found = []
    for guide in GUIDES:
        text = guide.read_text()
        for block in re.findall(r"^```(?:bash)?\n(.*?)^```$", text, re.S | re.M):
            for line in block.splitlines():
                found += words_of(line.removeprefix("a$ ").removeprefix("b$ "))
        for command in re.findall(r"`(paceline [a-z]+ [^`]+)`", text):
            found += words_of(command)
    return found


COMMANDS = commands()
PLANS = [one for one in COMMANDS if one[0] == "plan" and "--machine" in one]
RUNS = [one for one in COMMANDS if one[0] in ("train", "rehearse") and "--resume" not in one]


def test_each_option_exists():
    assert {verb for verb, *_ in COMMANDS} >= {"plan", "train", "rehearse", "hub", "worker"}
    for verb, *rest in COMMANDS:
        known = {name for one in loaded(verb).params for name in one.opts}
        assert {one for one in rest if one.startswith("--")} <= known, rest


@pytest.mark.parametrize("arguments", RUNS, ids=" ".join)
def test_the_settings_of_each_run_are_accepted(arguments, monkeypatch, capsys):
    """A guide once combined a codec with a strategy that refuses it."""
    begun = []
    monkeypatch.setattr(running, "open_server", lambda *_: nullcontext())
    monkeypatch.setattr(launching, "carry_out", begun.append)
    done = Line(monkeypatch, capsys)(*arguments)
    assert done.code == 0, done.err
    assert [request.settings.model for request in begun] == [arguments[1]]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", PLANS, ids=" ".join)
def test_each_plan_is_made(arguments, monkeypatch, capsys):
    done = Line(monkeypatch, capsys)(*arguments)
    assert done.code == 0, done.err
    assert done.out


def test_the_page_which_command_names_every_command():
    assert set(re.findall(r"`paceline ([a-z]+)", WHICH)) == set(KNOWN)


def test_the_batch_script_is_one_of_bash_with_options_of_sbatch():
    script = re.search(r"```bash\n(#!.*?)```", (DOCS / "launch" / "slurm.md").read_text(), re.S)[1]
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    head = script.partition("\nset -euo pipefail\n")[0]
    assert all(line.startswith("#") for line in head.splitlines())  # sbatch reads no further
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", head, re.M))
    assert len(options) == head.count("#SBATCH")
    assert all(re.fullmatch(SBATCH[name], value) for name, value in options.items()), options
