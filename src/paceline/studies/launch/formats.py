"""What starts a job: torchrun's commands, a batch script, or a description in YAML.

Their fields are those of torchrun of PyTorch 2.10, of Slurm's sbatch and srun, of SkyPilot's task
YAML, and of Kubeflow Trainer's TrainJob (trainer.kubeflow.org/v1alpha1, of version 2.2 or newer).
"""

import json
from collections.abc import Callable, Iterable
from enum import StrEnum

from paceline.core.errors import InvalidInput
from paceline.studies.launch.job import Job

_RUNTIME = "torch-distributed"  # the ClusterTrainingRuntime that comes with Kubeflow Trainer
_SAVING_S = 120  # before Slurm's limit of time: for a checkpoint


class Launcher(StrEnum):
    """What starts the processes of a job."""

    TORCHRUN = "torchrun"
    SLURM = "slurm"
    SKYPILOT = "skypilot"
    KUBERNETES = "kubernetes"


def written(job: Job, launcher: Launcher, version: str) -> str:
    """Return the text for a launcher; InvalidInput for what it needs and nobody has said.

    `version` is that of Paceline, which machines of a cloud install.
    """
    write: dict[Launcher, Callable[[Job, str], str]] = {
        Launcher.TORCHRUN: _torchrun,
        Launcher.SLURM: _slurm,
        Launcher.SKYPILOT: _skypilot,
        Launcher.KUBERNETES: _kubernetes,
    }
    return write[launcher](job, version)


def _torchrun(job: Job, _: str) -> str:
    """Return a command for each machine."""
    nodes, asked = job.asked.nodes, job.asked
    if nodes > 1 and asked.master is None:
        raise InvalidInput("master", "name the first machine's address, as --master 10.0.0.1")
    master = asked.master or "127.0.0.1"
    lines = [*_remarks(job)]
    for node in range(nodes):
        place = "here" if nodes == 1 else f"on machine {node}"
        first = f", which is {master}" if nodes > 1 and node == 0 else ""
        where = f"--node-rank {node} --master-addr {master} --master-port {asked.master_port}"
        lines += [f"# {place}{first}:", f"{_command(job, str(nodes), where)}"]
    return "\n".join(lines) + "\n"


def _slurm(job: Job, _: str) -> str:
    """Return a script for sbatch: one task a machine, which is torchrun."""
    nodes, per_node, gpu = job.asked.nodes, job.num_per_node, job.asked.gpu
    asked = {
        "job-name": job.name,
        "nodes": nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": None if gpu is None else f"{gpu.lower()}:{per_node}",
        "cpus-per-task": job.asked.cpus or (None if gpu else per_node),
        "time": None if job.seconds is None else _clock(job.seconds),
        "signal": None if job.seconds is None else f"TERM@{_SAVING_S}",
        "output": "%x-%j.out",
    }
    options = [f"#SBATCH --{name}={value}" for name, value in asked.items() if value is not None]
    where = f'--rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$first:{_port(job)}"'
    command = _command(job, '"$SLURM_JOB_NUM_NODES"', where)
    return "\n".join(
        [
            "#!/bin/bash",
            *_remarks(job),
            "# sbatch THIS_FILE",
            *options,
            "set -euo pipefail",
            'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            f"srun --kill-on-bad-exit=1 {command}",
            "",
        ]
    )


def _skypilot(job: Job, version: str) -> str:
    """Return a task of SkyPilot, whose machines install Paceline."""
    gpu, cpus = job.asked.gpu, job.asked.cpus or job.num_per_node
    resources = f"accelerators: {gpu}:{job.num_per_node}" if gpu else f'cpus: "{cpus}+"'
    where = f'--node-rank "$SKYPILOT_NODE_RANK" --master-addr "$first" --master-port {_port(job)}'
    command = _command(job, '"$SKYPILOT_NUM_NODES"', where)
    return "\n".join(
        [
            *_remarks(job),
            "# sky launch THIS_FILE",
            f"name: {_text(job.name)}",
            f"num_nodes: {job.asked.nodes}",
            "resources:",
            f"  {resources}",
            "workdir: .",
            "setup: |",
            f"  pip install paceline=={version}",
            "run: |",
            '  first=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
            f"  {command}",
            "",
        ]
    )


def _kubernetes(job: Job, _: str) -> str:
    """Return a TrainJob; its controller tells torchrun of nodes and processes by PET_ variables."""
    asked = job.asked
    if asked.image is None:
        raise InvalidInput("image", "name a container image that has paceline, for kubernetes")
    kind = "cpu" if asked.gpu is None else "nvidia.com/gpu"
    count = job.num_per_node if asked.gpu or asked.cpus is None else asked.cpus
    deadline = [] if job.seconds is None else [f"  activeDeadlineSeconds: {job.seconds}"]
    return "\n".join(
        [
            *_remarks(job),
            "# kubectl create -f THIS_FILE",
            "apiVersion: trainer.kubeflow.org/v1alpha1",
            "kind: TrainJob",
            "metadata:",
            f"  generateName: {job.name}-",
            "spec:",
            *deadline,
            "  runtimeRef:",
            f"    name: {_RUNTIME}",
            "  trainer:",
            f"    image: {_text(asked.image)}",
            "    command: [torchrun]",
            "    args:",
            *(f"      - {_text(word)}" for word in job.module),
            f"    numNodes: {asked.nodes}",
            f"    numProcPerNode: {job.num_per_node}",
            "    resourcesPerNode:",
            "      limits:",
            f"        {kind}: {_text(str(count))}",
            "",
        ]
    )


def _command(job: Job, nodes: str, where: str) -> str:
    """Return torchrun's command line on one machine."""
    return (
        f"torchrun --nnodes {nodes} --nproc-per-node {job.num_per_node} {where} {job.shell_module}"
    )


def _remarks(job: Job) -> Iterable[str]:
    nodes, per_node = job.asked.nodes, job.num_per_node
    machines = "1 machine" if nodes == 1 else f"{nodes} machines"
    workers = "1 worker" if per_node == 1 else f"{per_node} workers"
    yield f"# paceline launch: {job.settings.model} on {machines}, {workers} each"
    for sentence in job.predicted:
        yield f"# {sentence}"


def _port(job: Job) -> int:
    return job.asked.master_port


def _clock(seconds: int) -> str:
    """Return hours, minutes and seconds as Slurm writes them."""
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _text(text: str) -> str:
    """Return a string of YAML, whose quoted ones take what JSON's do."""
    return json.dumps(text, ensure_ascii=False)
