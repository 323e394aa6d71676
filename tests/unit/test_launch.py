import json
import re
import shlex
import subprocess

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

from command_line import MACHINE
from paceline.commands import running
from paceline.core.errors import InvalidInput
from paceline.core.settings import TrainSettings
from paceline.records.settings import validated_settings
from paceline.studies.launch.formats import Launcher, written
from paceline.studies.launch.job import Job, JobSettings, words

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


def job(asked=None, **settings) -> Job:
    given = validated_settings({"model": "lenet5", "workers": 4, "batch_size": 64, **settings})
    return Job(settings=given, asked=JobSettings(**(asked or {"nodes": 2})))


def arguments_of(text: str) -> list[str]:
    """Return the words after `paceline` of the last command in a text, as a shell reads them."""
    line = next(one for one in text.splitlines()[::-1] if " -m paceline " in one)
    return shlex.split(line.partition(" -m paceline ")[2])


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
def test_no_text_of_the_user_is_read_as_anything_but_itself(data, output):
    settings = TrainSettings(model="a:b", workers=2, data=data, output=output)
    whole = Job(settings=settings, asked=JobSettings(nodes=1, image="i"))
    for launcher in (Launcher.TORCHRUN, Launcher.SLURM):
        text = written(whole, launcher, "1.0").splitlines()[-1]
        assert shlex.split(text)[-len(whole.module) :] == list(whole.module)
    run = yaml.safe_load(written(whole, Launcher.SKYPILOT, "1.0"))["run"]
    assert shlex.split(run.splitlines()[-1])[-len(whole.module) :] == list(whole.module)
    trainer = yaml.safe_load(written(whole, Launcher.KUBERNETES, "1.0"))["spec"]["trainer"]
    assert tuple(trainer["args"]) == whole.module


def test_a_batch_script_is_one_of_bash_with_options_of_sbatch():
    text = written(job({"nodes": 2, "gpu": "H100", "hours": 1.5}), Launcher.SLURM, "1.0")
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    head, _, body = text.partition("\nset -euo pipefail\n")
    assert text.startswith("#!/bin/bash\n")
    assert all(line.startswith("#") for line in head.splitlines())  # sbatch reads no further
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", head, re.MULTILINE))
    assert all(re.fullmatch(SBATCH[name], value) for name, value in options.items()), options
    assert (options["nodes"], options["gpus-per-node"], options["time"]) == (
        *("2", "h100:2", "01:30:00"),
    )
    assert body.count("srun ") == 1


def test_a_train_job_has_the_fields_of_kubeflow_trainer():
    asked = {"nodes": 2, "gpu": "H100", "hours": 1.5, "image": "ghcr.io/me/mine:1"}
    found = yaml.safe_load(written(job(asked), Launcher.KUBERNETES, "1.0"))
    read = TrainerV1alpha1TrainJob.from_dict(found)
    assert read.to_dict() == found  # no field that its models do not have
    assert found["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    trainer = read.spec.trainer
    assert (trainer.num_nodes, trainer.num_proc_per_node) == (2, 2)
    assert trainer.command == ["torchrun"]
    assert read.spec.active_deadline_seconds == 5400
    assert found["spec"]["trainer"]["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": "2"}}


def test_a_task_of_skypilot_has_its_fields():
    for asked, resources in (
        ({"nodes": 2, "gpu": "H100"}, {"accelerators": "H100:2"}),
        ({"nodes": 2, "cpus": 8}, {"cpus": "8+"}),
    ):
        found = yaml.safe_load(written(job(asked), Launcher.SKYPILOT, "1.0"))
        assert set(found) == {"name", "num_nodes", "resources", "workdir", "setup", "run"}
        assert (found["num_nodes"], found["resources"]) == (2, resources)
        assert found["setup"] == "pip install paceline==1.0\n"
        shell = ["bash", "-n"]
        assert subprocess.run(shell, input=found["run"], text=True).returncode == 0


def test_the_plan_of_a_machine_chooses_what_is_not_given(line):
    line("launch", *ALEXNET, "--emit", "slurm", *CLUSTER)
    assert line.code == 0, line.err
    assert "# predicted on 2x2xv100+25gbe: " in line.out
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", line.out, re.MULTILINE))
    per_node = int(options["gpus-per-node"].partition(":")[2])
    arguments = arguments_of(line.out)
    workers = int(arguments[arguments.index("--workers") + 1])
    assert workers == int(options["nodes"]) * per_node
    line("plan", *ALEXNET, *CLUSTER[:2], "--strategy", "allreduce,host,tree", "--json")
    plans = json.loads(line.out)["plans"]
    assert workers == next(one["workers"] for one in plans if one["codec"] is None)


def test_what_is_given_is_not_chosen_by_the_plan(line):
    given = ("--strategy", "host", "--workers", "4")
    line("launch", *ALEXNET, *given, "--emit", "slurm", *CLUSTER, "--json")
    found = json.loads(line.out)
    assert found["launcher"] == "slurm"
    assert "--strategy host --workers 4" in found["text"]
    assert "#SBATCH --nodes=2" in found["text"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--emit", "torchrun", "--nodes", "2"), "master: name the first machine's address"),
        (("--emit", "kubernetes"), "image: name a container image that has paceline"),
        (("--emit", "slurm", "--workers", "3", "--nodes", "2"), "nodes: 3 workers cannot be shar"),
        (("--emit", "slurm", "--nodes", "0"), "nodes: Input should be greater than or equal to 1"),
        (("--emit", "slurm", "--gpu", "H 100"), "gpu: String should match pattern"),
        (("--emit", "slurm", "--strategy", "hogbatch"), "hogbatch starts its workers itself"),
        (("--emit", "slrum"), "'slrum' is not one of 'torchrun', 'slurm'"),
        (("--emit", "slurm", "--machine", "dgx1-v100"), "gpu: the plan is for GPUs; name them"),
        (
            ("--emit", "slurm", "--machine", MACHINE, "--workers", "5"),
            "workers: 5 do not fit; machine",
        ),
    ],
)
def test_what_no_cluster_could_start_is_refused(line, arguments, message):
    line("launch", "lenet5", *arguments)
    assert (line.code, line.out, line.err.count("\n")) == (2, "", 1)
    assert message in line.err


@pytest.mark.parametrize("text", ["a\nb", "\u2028", "\x85", "\ufffe"])
def test_what_a_file_of_yaml_or_a_shell_would_read_otherwise_is_refused(text):
    with pytest.raises(InvalidInput, match="has characters that no such file can hold"):
        job(data=f"text:{text}", model="gpt")


def test_defaults_are_left_out_but_for_how_the_work_is_shared():
    said = ["lenet5", "--strategy", "allreduce", "--workers", "2", "--batch-size", "64"]
    assert list(words(TrainSettings(model="lenet5"))) == said
