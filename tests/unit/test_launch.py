"""`paceline launch`: a shell reads the settings that were given; and the commands of the guides."""

import re
import shlex
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from command_line import Line
from jobs import arguments_of, job
from paceline.commands import running
from paceline.commands.app import COMMANDS as KNOWN
from paceline.commands.app import loaded
from paceline.core.settings import TrainSettings
from paceline.records.settings import validated_settings
from paceline.runs import launching
from paceline.studies.launch.formats import Launcher, written
from paceline.studies.launch.job import Job, JobSettings
from refusals import refused

CLUSTER = ("--machine", "2x2xv100+25gbe", "--gpu", "V100")
ALEXNET = ("alexnet", "--batch-size", "128")
# Options of sbatch, and what their values look like: written by hand, as Slurm brings no parser.
SBATCH = {
    "job-name": r"[\w-]+",
    "nodes": r"\d+",
    "ntasks-per-node": r"\d+",
    "gpus-per-node": r"(\w+:)?\d+",
    "cpus-per-task": r"\d+",
    "time": r"\d+:\d\d:\d\d",
    "signal": r"TERM@\d+",
    "output": r"%x-%j\.out",
}
TEXTS = st.text(min_size=1).filter(str.isprintable)


def sbatch_options(text: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", text, re.MULTILINE))


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "host", "options": {"chunk": 2, "codec": "half"}, "steps": 7},
        {"force": True, "balance": "auto", "strategy": "host"},
        {"optimizer": "adamw", "optimizer_options": {"weight_decay": 0.25, "betas": [0.5, 0.75]}},
        {"strategy": "auto", "precision": "bfloat16", "clip_norm": 1.5, "tensorboard": "a b"},
        {"data": "text:it's; a $HOME", "model": "gpt", "checkpoint_every": "500"},
    ],
)
def test_the_command_line_gives_the_same_settings_again(line, monkeypatch, settings):
    wanted, read = job(**settings), []
    monkeypatch.setattr(running, "_carry_out", lambda verb, values, **how: read.append(values))
    line(*arguments_of(written(wanted, Launcher.SLURM, "1.0")))
    assert line.code == 0, line.err
    assert validated_settings(read[0]) == wanted.settings


@given(data=TEXTS, output=TEXTS)
def test_no_text_of_the_user_is_read_by_a_shell_as_anything_but_itself(data, output):
    settings = TrainSettings(model="a:b", workers=2, data=data, output=output)
    whole = Job(settings=settings, asked=JobSettings(nodes=1))
    for launcher in (Launcher.TORCHRUN, Launcher.SLURM):
        text = written(whole, launcher, "1.0").splitlines()[-1]
        assert shlex.split(text)[-len(whole.module) :] == list(whole.module)


def test_a_batch_script_is_one_of_bash_with_options_of_sbatch():
    text = written(job({"nodes": 2, "gpu": "H100", "hours": 1.5}), Launcher.SLURM, "1.0")
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    head, _, body = text.partition("\nset -euo pipefail\n")
    assert text.startswith("#!/bin/bash\n")
    assert all(line.startswith("#") for line in head.splitlines())  # sbatch reads no further
    options = sbatch_options(head)
    assert all(re.fullmatch(SBATCH[name], value) for name, value in options.items()), options
    assert (options["nodes"], options["gpus-per-node"], options["time"]) == (
        *("2", "h100:2", "01:30:00"),
    )
    assert body.count("srun ") == 1


def test_the_plan_of_a_machine_chooses_what_is_not_given(line):
    line("launch", *ALEXNET, "--emit", "slurm", *CLUSTER)
    options, arguments = sbatch_options(line.out), arguments_of(line.out)
    workers = int(arguments[arguments.index("--workers") + 1])
    per_node = int(options["gpus-per-node"].partition(":")[2])
    assert workers == int(options["nodes"]) * per_node
    asked = (*CLUSTER[:2], "--strategy", "allreduce,host,tree", "--json")
    plans = line("plan", *ALEXNET, *asked).found["plans"]
    assert workers == next(one["workers"] for one in plans if one["codec"] is None)


def test_what_is_given_is_not_chosen_by_the_plan(line):
    given = ("--strategy", "host", "--workers", "4")
    found = line("launch", *ALEXNET, *given, "--emit", "slurm", *CLUSTER, "--json").found
    assert found["launcher"] == "slurm"
    assert "--strategy host --workers 4" in found["text"]
    assert "#SBATCH --nodes=2" in found["text"]


@pytest.mark.parametrize("text", ["a\nb", "\u2028", "\x85", "\ufffe"])
def test_what_a_file_of_yaml_or_a_shell_would_read_otherwise_is_refused(text):
    with refused("job"):
        job(data=f"text:{text}", model="gpt")


# Each command of Paceline in the guides exists, with its options; plans are made.
DOCS = Path(__file__).parents[2] / "docs"
LAUNCH = sorted((DOCS / "launch").glob("*.md"))
LAUNCHERS = [page for page in LAUNCH if page.stem != "index"]
# Commands of your own strategy need its module: tests/whole/test_own_strategy.py.
OTHERS = [page for page in (DOCS / "how-to").glob("*.md") if page.stem != "own-strategy"]
GUIDES = [*sorted(OTHERS), *LAUNCH]
WHICH = (DOCS / "how-to" / "which-command.md").read_text()


def words_of(command: str) -> list[list[str]]:
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
