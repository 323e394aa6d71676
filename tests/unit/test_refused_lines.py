"""What a command refuses beyond its settings, before it starts anything: the field that it names.

A row of the settings themselves stands in test_refused_settings.py.
"""

import json
from pathlib import Path

import pytest

from command_line import MACHINE, steps, write_run
from paceline.record.trace import write_trace
from profiles import profile_result, write_profile

LENET5 = ("plan", "lenet5", "--machine", MACHINE)
TRAIN, PACED = ("train", "lenet5"), ("rehearse", "lenet5", "--device", "k40-gigabit/gpu0")
WHEEL, PACED_WHEEL = (*TRAIN, "--strategy", "wheel"), (*PACED, "--strategy", "wheel")
HOGBATCH = ("train", "mlp-64-32-10", "--strategy", "hogbatch", "--workers", "cpu:1")
MEASURED = ("plan", "lenet5", "--machine", "8xv100", "--strategy", "allreduce")
HUB, WORKER = ("hub", "lenet5"), ("worker", "--connect", "tcp://127.0.0.1:1")
LAUNCH = ("launch", "lenet5", "--emit")
RUN_FIELDS = {"kind": "plan", "model": "net", "machine": "a", "batch_size": 1, "facts": {}}
RANKING = {"plans": [], "refused": []} | dict.fromkeys(
    ("workers_worth", "workers_sentence", "advice")
)
ROWS = {
    # A machine, and what is planned on it.
    "machine": [("plan", "lenet5", "--machine", "two-core-epic")],
    "none.toml": [
        ("plan", "lenet5", "--machine", "none.toml"),
        ("rehearse", "lenet5", "--device", "none.toml:a"),
        ("train", "--config", "none.toml"),
    ],
    ".": [("plan", "lenet5", "--machine", ".")],
    "bad.toml": [("plan", "lenet5", "--machine", "bad.toml")],
    "measured, profile": [
        (*MEASURED, "--measured", "350/s", "--profile", "two"),
        ("plan", "lenet5", "--measured", "350/s"),
    ],
    "precision": [("plan", "lenet5", "--precision", "float16")],
    "explain, sweep": [("plan", "lenet5", "--explain")],
    "explain": [(*LENET5, "--explain", "--sweep", "bandwidth=1M:2M")],
    "measured": [(*MEASURED, "--measured", "350")],
    "profile": [(*MEASURED, "--profile", "two")],
    "input_shape": [("plan", "lenet5", "--input-shape", "1x32x32")],
    "data": [(*LENET5, "--data", "digits")],
    "sweep": [(*LENET5, "--sweep", "bandwidth=1:2")],
    "output": [
        (*LENET5, "--output", "file/inside"),
        (*LENET5, "--sweep", "bandwidth=1M:2M", "--output", "plans"),
    ],
    "lenet5": [(*LENET5, "--input-shape", "9x9")],
    "torch.nn:ReLU": [("plan", "torch.nn:ReLU", "--machine", MACHINE)],
    "workers": [
        (*LENET5, "--workers", 3),
        (*LENET5, "--workers", 2, "--batch-size", 1),
        (*WHEEL, "--workers", 60),
        (*WHEEL, "--data", "synthetic:samples=10", "--workers", 12, "--set", "lanes=12"),
        (*HOGBATCH, "--workers", "cpu:4000"),
        (*PACED, "--workers", 9999, "--batch-size", 9999),
        (*PACED_WHEEL, "--workers", 60),
        (*WORKER, "--as", "a"),
        ("profile", "lenet5", "--workers", 1000, "--batch-size", 1000),
        (*LAUNCH, "slurm", "--machine", MACHINE, "--workers", 5),
    ],
    # Options of a strategy.
    "options": [
        (*LENET5, "--set", "codec=half"),
        (*LENET5, "--strategy", "allreduce,host", "--set", "chunk=1"),
        (*LENET5, "--strategy", "host", "--set", "workers=1"),
    ],
    "strategy host": [(*LENET5, "--strategy", "host", "--set", "chunks=1")],
    "--set": [(*TRAIN, "--set", "bucket_mb")],
    "--optimizer-set": [(*TRAIN, "--optimizer-set", "eps")],
    "optimizer": [(*HOGBATCH, "--optimizer", "lbfgs")],
    "optimizer_options": [(*TRAIN, "--optimizer", "adamw", "--optimizer-set", "ep=1")],
    "momentum": [
        (*HOGBATCH, "--optimizer", "adam", "--momentum", 0.9),
        (*WHEEL, "--optimizer", "adam", "--momentum", 0.9),
    ],
    "schedule": [("train", "gpt", "--schedule", "cosin")],
    "head": [(*WHEEL, "--set", "head=none"), (*PACED_WHEEL, "--set", "head=none")],
    "staleness": [(*WHEEL, "--set", "staleness=0")],
    "staleness_decay": [(*PACED_WHEEL, "--set", "staleness_decay=1")],
    "codec": [
        (*LENET5, "--strategy", "host", "--set", "codec=threshold:1@2"),
        (*WHEEL, "--codec", "activations=onebit"),
        (*WHEEL, "--codec", "activation_gradients=auto"),
        (*WHEEL, "--codec", "gradients=threshold:0.1"),
    ],
    "cpu_batch": [(*HOGBATCH, "--set", "cpu_batch=[1,5000]")],
    "checkpoint_every": [(*WHEEL, "--checkpoint-every", 500)],
    # Devices and addresses.
    "device": [
        ("rehearse", "lenet5", "--device", "k99"),
        ("rehearse", "lenet5", "--device", f"{MACHINE}:gpu"),
        (*PACED_WHEEL, "--device", "abacus"),
        (*WORKER, "--device", "tpu"),
    ],
    "bind": [
        HUB,
        (*HUB, "--bind", "tcp://0.0.0.0:5555"),
        (*HUB, "--bind", "tcp://10.9.9.9:5555"),
        (*PACED_WHEEL, "--bind", "tcp://0.0.0.0:5555"),
    ],
    "address": [(*HUB, "--bind", "tcp://*:5555"), ("worker", "--connect", "tcp://127.0.0.1")],
    "none/hub.key": [(*HUB, "--bind", "tcp://127.0.0.1:5555", "--keys", "none")],
    "none/worker.key": [(*WORKER, "--keys", "none")],
    "connect": [("worker",), ("worker", "--connect", "tcp://10.9.9.9:5555")],
    "model": [
        ("plan", "lenet6", "--machine", MACHINE),
        ("hub",),
        ("hub", "--config", "empty.toml"),
    ],
    "strategy": [
        ("plan", "lenet5", "--strategy", "host,tree"),
        ("hub", "--config", "host.toml"),
        (*LAUNCH, "slurm", "--strategy", "hogbatch"),
    ],
    "master": [(*LAUNCH, "torchrun", "--nodes", 2)],
    "image": [(*LAUNCH, "kubernetes")],
    "nodes": [(*LAUNCH, "slurm", "--workers", 3, "--nodes", 2)],
    "gpu": [(*LAUNCH, "slurm", "--machine", "2xv100")],
    # Files and folders.
    "wrong.toml": [("train", "--config", "wrong.toml")],
    "train.toml": [("plan", "--config", "train.toml")],
    "steps": [("train", "--config", "both.toml")],
    "resume": [
        ("train", "--resume", "empty.toml"),
        (*WHEEL, "--resume", "none"),
        (*WHEEL, "--resume", "old"),
    ],
    "misspelled/run.toml": [("train", "--resume", "misspelled")],
    "none": [
        ("compare", "none"),
        ("compare", "run", "none"),
        ("report", "none"),
        (*MEASURED, "--profile", "none"),
    ],
    "plan": [("compare", "run", "plan"), ("report", "plan", "--rehearsal", "run")],
    "two": [("compare", "run", "two"), ("compare", "two", "run"), ("compare", "run", "run", "two")],
    "empty/trace.json": [("compare", "empty"), ("compare", "run", "empty")],
    "short": [("compare", "short")],
    "run or short": [("compare", "run", "short")],
    "nameless/result.json": [("compare", "run", "nameless")],
    "damaged/result.json": [("report", "damaged"), ("report", "damaged", "--rehearsal", "run")],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Files and folders that commands are asked to use."""
    folder = tmp_path_factory.mktemp("files")
    for name, text in {
        "file": "",
        "bad.toml": "[[hosts]]",
        "empty.toml": "",
        "wrong.toml": 'model = "lenet5"\nepoch = 3\n',
        "train.toml": 'model = "lenet5"\nepochs = 3\n',
        "both.toml": 'model = "lenet5"\nepochs = 3\nsteps = 3\n',
        "host.toml": 'model = "lenet5"\nstrategy = "host"\nbind = "tcp://127.0.0.1:0"\n',
        "misspelled/run.toml": 'model = "lenet5"\nsnapshots = "kept"\n',
        "old/run.toml": "profile_s = 1.0\n",
        "empty/trace.json": '{"traceEvents": []}',
        "plan/result.json": json.dumps(
            RUN_FIELDS | {"id": "plan", "ranking": RANKING | {"advice": None}}
        ),
        "damaged/result.json": json.dumps(RUN_FIELDS | {"id": "damaged"}),
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    write_run(folder / "run", 1, 1)
    write_profile(folder / "two", profile_result())
    for name in ("nameless", "plan", "damaged"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "trace.json").write_text((folder / "run" / "trace.json").read_text())
    (folder / "short").mkdir()
    one = steps(1, "predicted", 1), steps(1, "measured", 1)
    write_trace(folder / "short" / "trace.json", one)
    return folder


@pytest.mark.parametrize(
    ("field", "arguments"), [(field, row) for field, rows in ROWS.items() for row in rows]
)
def test_what_a_command_cannot_do_is_refused(line, files, monkeypatch, arguments, field):
    monkeypatch.chdir(files)
    assert line(*arguments).refused == field
    assert not list(files.glob("runs/*"))
