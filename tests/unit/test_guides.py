"""The guides: each command of Paceline in them exists, with its options; plans are made."""

import re
import shlex
from contextlib import nullcontext
from pathlib import Path

import pytest

from command_line import Line
from paceline.commands import running
from paceline.commands.app import COMMANDS as KNOWN
from paceline.commands.app import loaded
from paceline.runs import launching

DOCS = Path(__file__).parents[2] / "docs"
LAUNCH = sorted((DOCS / "launch").glob("*.md"))
LAUNCHERS = [page for page in LAUNCH if page.stem != "index"]
GUIDES = [*sorted((DOCS / "how-to").glob("*.md")), *LAUNCH]
WHICH = (DOCS / "how-to" / "which-command.md").read_text()


def arguments_of(command: str) -> list[list[str]]:
    """The arguments of a command of paceline, in whatever it is started by; else none."""
    words = shlex.split(re.sub(r"^torchrun .* -m ", "", command.partition(" > ")[0]))
    return [words[1:]] if words[:1] == ["paceline"] and words[1].isalpha() else []


def commands() -> list[list[str]]:
    """The arguments of each command in the guides: in blocks, and in cells of tables."""
    found = []
    for guide in GUIDES:
        text = guide.read_text()
        for block in re.findall(r"```\n(.*?)```", text, re.S):
            for line in block.splitlines():
                found += arguments_of(line.removeprefix("a$ ").removeprefix("b$ "))
        for command in re.findall(r"`(paceline [a-z]+ [^`]+)`", text):
            found += arguments_of(command)
    return found


COMMANDS = commands()
PLANS = [one for one in COMMANDS if one[0] == "plan" and "--machine" in one]
RUNS = [one for one in COMMANDS if one[0] in ("train", "rehearse") and "--resume" not in one]


def test_there_are_commands_to_test():
    assert {verb for verb, *_ in COMMANDS} >= {"plan", "train", "rehearse", "hub", "worker"}


def test_each_option_exists():
    for verb, *rest in COMMANDS:
        known = {name for one in loaded(verb).params for name in one.opts}
        assert {one for one in rest if one.startswith("--")} <= known, rest


@pytest.mark.parametrize("arguments", RUNS, ids=" ".join)
def test_a_run_with_settings_that_do_not_go_together_is_noticed(arguments, monkeypatch, capsys):
    """One guide had a codec with a strategy that refused it."""
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


def test_the_page_of_questions_leaves_no_command_out():
    assert set(re.findall(r"`paceline ([a-z]+)", WHICH)) == set(KNOWN)


@pytest.mark.parametrize("page", LAUNCHERS, ids=lambda page: page.stem)
def test_what_launch_prints_is_what_its_page_shows(line, page):
    text = page.read_text()
    (command,) = re.findall(r"^paceline launch (.*)$", text, re.M)
    line("launch", *shlex.split(command.partition(" > ")[0]))
    assert line.code == 0, line.err
    shown = re.search(r"```(?:bash|yaml)\n(.*?)```", text, re.S)[1]
    assert line.out == shown
