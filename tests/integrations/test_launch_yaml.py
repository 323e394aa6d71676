"""The YAML files in the guides match the formats of Kubeflow Trainer and SkyPilot."""

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

GUIDES = Path(__file__).parents[2] / "docs" / "launch"


def shown(page: str) -> Any:
    text = (GUIDES / f"{page}.md").read_text()
    return yaml.safe_load(re.search(r"```yaml\n(.*?)```", text, re.S)[1])


def test_a_train_job_has_the_fields_of_kubeflow_trainer():
    found = shown("kubernetes")
    read = TrainerV1alpha1TrainJob.from_dict(found)
    assert read.to_dict() == found  # no unknown field
    assert found["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert (read.spec.trainer.num_nodes, read.spec.trainer.num_proc_per_node) == (2, 8)


def test_a_skypilot_task_has_the_known_fields():
    found = shown("skypilot")
    assert set(found) == {"name", "num_nodes", "resources", "workdir", "setup", "run"}
    assert subprocess.run(["bash", "-n"], input=found["run"], text=True).returncode == 0
