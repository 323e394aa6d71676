"""TensorBoard reads the scalars that a run writes."""

import json

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("strategy", ["allreduce", "hogbatch"])
def test_scalars_equal_the_result(paceline, tmp_path, strategy):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    arguments = ("--data", "digits", "--epochs", "2", "--profile-s", "0.2", "--json")
    chosen = ("--strategy", strategy, "--tensorboard", "board")
    done = paceline("train", "lenet5", *arguments, *chosen)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    (folder,) = (tmp_path / "board").iterdir()
    assert folder.name == result["id"]
    events = reader.EventAccumulator(str(folder))
    events.Reload()
    found = {
        tag: [(one.step, one.value) for one in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    for tag, field in (
        ("loss/train", "train_loss"),
        ("loss/test", "test_loss"),
        ("accuracy/test", "score"),
    ):
        rows = [(row["number"] + 1, pytest.approx(row[field])) for row in result["epochs"]]
        assert found[tag] == rows
    rates = [(row["number"] + 1, pytest.approx(1438 / row["seconds"])) for row in result["epochs"]]
    assert found["throughput/samples_per_s"] == rates
