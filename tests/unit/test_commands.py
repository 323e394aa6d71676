"""The list of commands, what help shows of them, and what it takes to show it."""

import shlex
import subprocess
import sys

import pytest

from paceline.commands.app import COMMANDS, loaded

HEAVY = ("torch", "numpy", "pydantic", "paceline.strategies", "paceline.records", "plotly")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_example_is_a_command_line_that_the_command_reads(name):
    command, words = loaded(name), shlex.split(COMMANDS[name].example)
    assert words[0] == name
    context = command.make_context(name, words[1:], resilient_parsing=True)
    given = {key: value for key, value in context.params.items() if value not in (None, ())}
    assert len(given) >= len([word for word in words if word.startswith("--")])


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_shows_its_example(line, name):
    line(name, "--help")
    assert (line.code, line.err) == (0, "")
    shown = " ".join(line.out.split())
    assert f"Example: paceline {COMMANDS[name].example}" in shown


def test_help_of_train_groups_its_options_and_keeps_brackets(line):
    line("train", "--help")
    panels = [one.split(" ")[1:] for one in line.out.splitlines() if one.startswith("╭─")]
    titles = [" ".join(words).split(" ─")[0] for words in panels]
    assert {"Workers", "Learning", "Model and data", "Going on", "Output"} <= set(titles)
    assert "Only with strategy hogbatch" in titles
    assert "[default: 64]" in line.out  # rich would take it for markup


def test_the_list_of_commands_needs_no_heavy_module():
    code = (
        "import sys; sys.argv = ['paceline', '--help']\n"
        "from paceline.commands.app import run; run()\n"
        f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"
    assert all(f" {name} " in done.stdout for name in COMMANDS)


def test_a_plan_of_a_built_in_model_needs_no_torch():
    code = (
        "import sys; sys.argv = ['paceline', 'plan', 'lenet5', '--machine', 'k40-gigabit']\n"
        "from paceline.commands.app import run; code = run()\n"
        "print(code, 'torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "0 False"


def test_completion_knows_commands_and_strategies():
    def completed(words: str) -> str:
        environment = {
            "_PACELINE_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split(" ")) - 1),
        }
        code = "import sys; sys.argv = ['paceline']\nfrom paceline.commands.app import run; run()"
        command = [sys.executable, "-c", code]
        return subprocess.run(command, env=environment, capture_output=True, text=True).stdout

    assert "profile" in completed("paceline pro").split()
    assert completed("paceline train --strategy ho").split() == ["host", "hogbatch"]
