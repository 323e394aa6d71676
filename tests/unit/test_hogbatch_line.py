"""What the command line says of a run on uneven workers that cannot be: before any is started."""

from pathlib import Path

import pytest

HOST = ("--strategy", "host", "--workers", "2")
TRAIN = ("train", "mlp-64-32-10", "--strategy", "hogbatch")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "cpu"], "workers: 'cpu' (worker 0) is not of the form cpu:THREADS"),
        (["--workers", "cpu:4000"], "workers: 4000 threads do not fit on"),
        (["--policy", "fair"], "strategy hogbatch: policy: 'fair' is none of hogwild, hogbatch"),
        (
            ["--policy", "hogwild", "--set", "policy=adaptive"],
            "policy: 'hogwild', but options say 'adaptive'",
        ),
        (["--set", "threads=2"], "options: threads is said by workers, as in cpu:4"),
        (["--set", "workers=2"], "options: workers is a setting of its own"),
        (["--set", "staleness_decay=-1"], "staleness_decay: Input should be greater than or"),
        (["--set", "cpu_batch=[9,4]"], "cpu_batch: a batch of at least 9 and at most 4 samples"),
        (
            ["--workers", "cpu:1", "--set", "cpu_batch=[1,5000]"],
            "cpu_batch: policy adaptive gives worker 0 (cpu:1) batches of up to 5,000 samples, "
            "but there are 1,438 to train on",
        ),
        (["--optimizer", "lbfgs"], "optimizer: 'lbfgs' is not one that can be used"),
        (["--optimizer", "adam", "--momentum", "0.9"], "momentum: optimizer adam has none"),
        (["--port", "7"], "port: goes not with strategy hogbatch"),
        (["--batch-size", "0"], "batch_size: Input should be greater than or equal to 1"),
        ([*HOST, "--policy", "adaptive"], "policy: goes not with strategy host"),
        (["--strategy", "host", "--workers", "cpu:1"], "workers: 'cpu:1' is not a number"),
    ],
)
def test_what_cannot_be_done_is_one_line(line, arguments: list[str], message: str):
    line(*TRAIN, "--workers", "cpu:1", *arguments)
    assert (line.code, line.out) == (2, "")
    (said,) = [text for text in line.err.splitlines() if text.startswith("paceline: ")]
    assert message in said


def test_a_rehearsal_is_refused(line):
    line("rehearse", "mlp-64-32-10", "--strategy", "hogbatch", "--device", "k40-gigabit")
    assert line.code == 2
    assert "strategy: 'hogbatch' cannot be rehearsed; choose one of" in line.err


@pytest.mark.parametrize("num_outputs", [982, 984])
def test_labels_need_as_many_outputs(line, tmp_path: Path, monkeypatch, num_outputs: int):
    name = f"net_of_{num_outputs}"
    text = f"from torch import nn\ndef net():\n    return nn.Linear(500, {num_outputs})\n"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    data = ("--data", "delicious-like:samples=20", "--strategy", "hogbatch", "--workers", "cpu:1")
    line("train", f"{name}:net", *data)
    assert line.code == 2
    assert f"has {num_outputs} outputs, but its data have 983 labels, of which" in line.err


def test_a_rank_of_torchrun_is_no_coordinator(line, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    line(*TRAIN)
    assert line.code == 2
    assert "hogbatch starts its workers itself; run it without torchrun" in line.err
