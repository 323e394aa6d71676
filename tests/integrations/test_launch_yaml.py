"""What starts a job in YAML, as the models of Kubeflow Trainer and a task of SkyPilot read it."""

import shlex
import subprocess

import yaml
from hypothesis import given
from hypothesis import strategies as st
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

from jobs import job
from paceline.core.settings import TrainSettings
from paceline.studies.launch.formats import Launcher, written
from paceline.studies.launch.job import Job, JobSettings

TEXTS = st.text(min_size=1).filter(str.isprintable)


@given(data=TEXTS, output=TEXTS)
def test_no_text_of_the_user_is_read_as_anything_but_itself(data, output):
    settings = TrainSettings(model="a:b", workers=2, data=data, output=output)
    whole = Job(settings=settings, asked=JobSettings(nodes=1, image="i"))
    run = yaml.safe_load(written(whole, Launcher.SKYPILOT, "1.0"))["run"]
    assert shlex.split(run.splitlines()[-1])[-len(whole.module) :] == list(whole.module)
    trainer = yaml.safe_load(written(whole, Launcher.KUBERNETES, "1.0"))["spec"]["trainer"]
    assert tuple(trainer["args"]) == whole.module


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
