"""One worker that exchanges with itself: the same training, and an exchange that really runs."""

import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

ASKED = ("lenet5", "--data", "synthetic:samples=80,classes=4", "--batch-size", "8", "--epochs", "1")
QUICK = ("--workers", "1", "--profile-s", "0.2", "--seed", "3")


@pytest.mark.parametrize("strategy", ["allreduce", "host", "tree"])
def test_the_mean_of_one_workers_gradients_is_its_gradients(outcome, tmp_path, strategy):
    """The oracle is the training without an exchange, bit for bit."""
    asked = ("train", *ASKED, *QUICK, "--strategy", strategy)
    found = [outcome(*asked, *more) for more in ((), ("--exchange-alone",))]
    assert found[1]["faults"] == []
    weights = [load_file(tmp_path / "runs" / one["id"] / "model.safetensors") for one in found]
    assert weights[0].keys() == weights[1].keys()
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])
    spent = [
        {row["quantity"]: row["right_s"] for row in one["comparison"]["rows"]} for one in found
    ]
    assert spent[0]["exposed"] + spent[0]["hidden"] == 0
    # A tree of one worker has nobody to send to: it only fills its buffer.
    assert (spent[1]["exposed"] + spent[1]["hidden"] > 0) == (strategy != "tree")


def test_a_study_of_the_overhead_is_table_ii(outcome):
    """Methods differ on one worker, which exchanges with itself."""
    asked = ("scale", "lenet5", "--workers", "1", "--batch-size", "8")
    asked += ("--strategy", "allreduce,host")
    quick = ("--steps", "5", "--repeats", "1", "--profile-s", "0.2", "--output", "study")
    for cell in outcome(*asked, "--overhead", *quick)["cells"]:
        assert cell["error"] is None
        assert cell["exposed_s"] + cell["hidden_s"] > 0
