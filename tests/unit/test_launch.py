"""`paceline launch`: what starts a job is read by a shell as the settings that were given."""

import re
import shlex
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs import arguments_of, job
from paceline.commands import running
from paceline.core.settings import TrainSettings
from paceline.records.settings import validated_settings
from paceline.studies.launch.formats import Launcher, written
from paceline.studies.launch.job import Job, JobSettings, words
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
        {},
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
    assert line.code == 0, line.err
    assert "2x2xv100+25gbe" in line.out
    options = sbatch_options(line.out)
    per_node = int(options["gpus-per-node"].partition(":")[2])
    arguments = arguments_of(line.out)
    workers = int(arguments[arguments.index("--workers") + 1])
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


def test_defaults_are_left_out_but_for_how_the_work_is_shared():
    said = ["lenet5", "--strategy", "allreduce", "--workers", "2", "--batch-size", "64"]
    assert list(words(TrainSettings(model="lenet5"))) == said
