"""What the command line says of a run of wheel that cannot be: before any process is started."""

import json
import stat
from pathlib import Path

import pytest
from pydantic import ValidationError

from paceline.rpc.connecting import WorkerProcessSettings

TRAIN = ("train", "lenet5", "--strategy", "wheel")
HUB = ("hub", "lenet5")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "cpu:1"], "workers: 'cpu:1' is not a number"),
        (["--workers", "0"], "workers: Input should be greater than or equal to 1"),
        (["--workers", "65"], "batch_size: 64 samples cannot be shared by 65 workers"),
        (["--set", "lanes=0"], "strategy wheel: lanes: Input should be greater than or equal"),
        (["--set", "workers=2"], "options: workers is a setting of its own"),
        (["--set", "hub=a"], "options: hub names a host of a machine file"),
        (["--set", "staleness=0"], "staleness: lanes that alternate fetch a step ahead"),
        (["--set", "staleness=-1"], "strategy wheel: staleness: Input should be greater"),
        (["--set", "head=none"], "head: 'none' is no layer of model lenet5"),
        (["--codec", "dynamic8"], "codec: 'dynamic8' is not of the form gradients=dynamic8"),
        (["--codec", "labels=half"], "codec: 'labels' travels by none; choose from activations,"),
        (["--codec", "activation_gradients=zip"], "codec: 'zip' is not known"),
        (
            ["--codec", "activation_gradients=half,activation_gradients=half"],
            "codec: activation_gradients is named twice",
        ),
        (
            ["--codec", "activation_gradients=half", "--set", "activation_gradients=dynamic8"],
            "codec: activation_gradients is",
        ),
        (["--codec", "activations=onebit"], "only gradients can travel by it"),
        (["--codec", "activation_gradients=auto"], "codec: 'auto' is a choice between codecs"),
        (["--codec", "gradients=threshold:0.1"], "codec: nobody knows beforehand how many"),
        (["--optimizer", "adam", "--momentum", "0.9"], "momentum: optimizer adam has none"),
        (["--resume", "none"], "resume: none is not the folder of a run, as it has no run.toml"),
        (["--resume", "old"], "old is not the folder of a run that has checkpoints"),
        (["--checkpoint-every", "-1s"], "checkpoint_every: '-1s' is neither a number of steps"),
        (["--checkpoint-every", "500"], "checkpoint_every: the workers of strategy wheel take no"),
        (["--policy", "adaptive"], "policy: goes not with strategy wheel, only"),
        (["--port", "7"], "port: goes not with strategy wheel"),
        (["--balance", "auto"], "balance: goes not with strategy wheel"),
        (
            ["--batch-size", "1500", "--workers", "1500", "--set", "lanes=1500"],
            "1438 samples cannot be shared by 1500 workers",
        ),
        (["--workers", "60"], "workers: 31 do not fit on"),
        (
            ["--strategy", "host", "--codec", "activations=half"],
            "codec: 'activations=half' is not known",
        ),
    ],
)
def test_what_cannot_be_done_is_one_line(line, tmp_path, arguments: list[str], message: str):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "run.toml").write_text("profile_s = 1.0\n")
    line(*TRAIN, *arguments)
    assert (line.code, line.out) == (2, ""), line.err
    (said,) = [text for text in line.err.splitlines() if text.startswith("paceline: ")]
    assert message in said


def test_a_model_without_a_head_is_planned_as_data_parallelism(line):
    """All of its parameters travel, there and back, beside the classes and their gradients."""
    plan = ("plan", "resnet110", "--machine", "k40-gigabit", "--batch-size", "32", "--json")
    line(*plan, "--strategy", "wheel", "--workers", "2", "--set", "lanes=1")
    assert line.code == 0, line.err
    [row] = [one for one in json.loads(line.out)["plans"] if one["workers"] == 2]
    line("plan", "resnet110", *plan[2:], "--strategy", "allreduce", "--workers", "2")
    [other] = [one for one in json.loads(line.out)["plans"] if one["workers"] == 2]
    assert row["wire_nbytes_per_step"] >= other["wire_nbytes_per_step"] / 2
    assert sum(row["memory_nbytes"].values()) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hub"], "model: name what to train, or a folder by --generate-keys"),
        ([*HUB], "bind: name the address that workers reach"),
        ([*HUB, "--bind", "tcp://0.0.0.0:5555"], "bind: 0.0.0.0 is every interface"),
        ([*HUB, "--bind", "tcp://*:5555"], "address: 'tcp://*:5555' is not of the form"),
        ([*HUB, "--bind", "tcp://10.9.9.9:5555"], "needs keys; write them with"),
        ([*HUB, "--bind", "tcp://127.0.0.1:5555", "--keys", "none"], "none/hub.key: No such file"),
        (["worker"], "connect: Field required"),
        (["worker", "--connect", "tcp://10.9.9.9:5555"], "needs keys; write them with"),
        (["worker", "--connect", "tcp://127.0.0.1"], "is not of the form tcp://10.0.0.1:5555"),
        (["worker", "--connect", "tcp://127.0.0.1:1", "--as", "a"], "are no numbers of work"),
        (["worker", "--connect", "tcp://127.0.0.1:1", "--device", "tpu"], "device: 'tpu' cannot"),
        (
            ["worker", "--connect", "tcp://127.0.0.1:1", "--keys", "none"],
            "none/worker.key: No such file",
        ),
        (
            ["worker", "--connect", "tcp://127.0.0.1:1", "--deadline-s", "nan"],
            "deadline_s: Input",
        ),
    ],
)
def test_what_neither_hub_nor_worker_can_do_is_one_line(line, arguments, message: str):
    line(*arguments)
    assert (line.code, line.out) == (2, ""), line.err
    assert message in line.err.splitlines()[-1]


def test_a_hub_that_is_not_there_is_waited_for_and_named(line):
    line("worker", "--connect", "tcp://127.0.0.1:1", "--deadline-s", "0.2", "--device", "cpu")
    assert line.code == 1
    assert (
        "no hub at tcp://127.0.0.1:1 has taken worker 0 in within 0.2 s"
        in line.err.splitlines()[-1]
    )


def test_keys_are_written_once_and_readable_by_nobody_else(line, tmp_path: Path):
    line("hub", "--generate-keys", "keys")
    assert line.code == 0
    assert [Path(path).name for path in line.out.split()] == [
        "hub.key",
        "hub.pub",
        "worker.key",
        "worker.pub",
    ]
    for name in ("hub.key", "worker.key"):
        assert stat.S_IMODE((tmp_path / "keys" / name).stat().st_mode) == 0o600
    line("hub", "--generate-keys", "keys")
    assert line.code == 2
    assert "is there already" in line.err


@pytest.mark.parametrize("text", ["", "1,1", "-1", "0;1"])
def test_numbers_of_workers_are_different_and_not_negative(text: str):
    assert WorkerProcessSettings(connect="", workers="2,3").numbers == (2, 3)
    with pytest.raises(ValidationError, match="are no numbers of workers"):
        WorkerProcessSettings(connect="", workers=text)
