"""The guides: each command of Paceline in them exists, with its options; plans are made."""

import re
import shlex
from pathlib import Path

import pytest

from command_line import Line
from paceline.commands.app import loaded

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs" / "how-to").glob("*.md"))


def commands() -> list[list[str]]:
    """The arguments of paceline, in whatever it is started by."""
    blocks = [
        line.removeprefix("a$ ").removeprefix("b$ ")
        for guide in GUIDES
        for block in re.findall(r"```\n(.*?)```", guide.read_text(), re.S)
        for line in block.splitlines()
        if line
    ]
    words = [shlex.split(re.sub(r"^torchrun .* -m ", "", line)) for line in blocks]
    return [arguments for program, *arguments in words if program == "paceline"]


COMMANDS = commands()


def test_there_are_commands_to_test():
    assert {verb for verb, *_ in COMMANDS} >= {"plan", "train", "rehearse", "hub", "worker"}


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_each_option_exists(arguments):
    verb, *rest = arguments
    known = {name for one in loaded(verb).params for name in one.opts}
    assert {one for one in rest if one.startswith("--")} <= known


@pytest.mark.parametrize("arguments", [one for one in COMMANDS if one[0] == "plan"], ids=" ".join)
def test_each_plan_is_made(arguments, monkeypatch, capsys):
    done = Line(monkeypatch, capsys)(*arguments)
    assert done.code == 0, done.err
    assert done.out
