"""Models whose head is split among workers, against one process; and whole runs of them."""

import json
import os
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_model

from launched import Found, run
from paceline.data import load
from paceline.models import find
from processes import Started

pytestmark = pytest.mark.slow

HEAD_VALUES = 11 * (10 + 1) + 7 * 11 + 5 * (7 + 1)
HEADER = 40
MOST = 9  # samples of a rank, of programs/subbatch_net.py
FEW_STEPS = 4  # of 20 that are traced
QUICK = ("--profile-s", "0.2", "--epochs", "1")


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Found:
    """What came of all cases, each for the first so many of four ranks."""
    return run(tmp_path_factory.mktemp("four"), 4, "subbatch.py")


def settled(outcomes: list[dict]) -> list[dict]:
    assert not [one["error"] for one in outcomes if "error" in one]
    return outcomes


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_fifty_steps_are_those_of_one_process(found: Found, size: int):
    outcomes = settled(found[f"equal_{size}"])
    assert outcomes[0]["worst"] < 1e-12
    for outcome in outcomes:
        assert outcome["loss"] < 1e-12
        loss, is_right = outcome["tested"]
        assert loss < 1e-11
        assert is_right


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_head_is_on_no_rank_whole(found: Found, size: int):
    own = [outcome["own"] for outcome in settled(found[f"equal_{size}"])]
    assert sum(own) == HEAD_VALUES
    assert max(own) < HEAD_VALUES / size + 2 * 11


@pytest.mark.parametrize("size", [2, 3])
def test_any_size_of_sub_batch_trains_as_one_process_does(found: Found, size: int):
    outcomes = settled(found[f"sized_{size}"])
    for outcome in outcomes:
        assert len(outcome["sized"]) == 7
        assert max(loss for _, loss, _ in outcome["sized"].values()) < 1e-12
    assert max(worst for worst, _, _ in outcomes[0]["sized"].values()) < 1e-12
    # The terms of the loss are the same bytes in all, and have a header in each sub-batch.
    sent = {int(one): nbytes for one, (_, _, nbytes) in outcomes[0]["sized"].items()}
    for one, nbytes in sent.items():
        fewer = MOST - min(MOST, -(-size * MOST // one))
        assert sent[size] - nbytes == 5 * (size - 1) * fewer * HEADER


@pytest.mark.parametrize("case", ["each", "norm", "each_of_five"])
@pytest.mark.parametrize("size", [2, 3])
def test_sub_batches_are_those_of_one_process(found: Found, case: str, size: int):
    assert settled(found[f"{case}_{size}"])[0]["worst"] < 1e-12


@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_number_of_ranks_takes_over_what_four_have_written(found: Found, size: int):
    assert all(outcome["wrong"] == [] for outcome in settled(found[f"loaded_{size}"]))


def test_what_is_encoded_is_less_and_trains_alike_on_all_ranks(found: Found):
    outcomes = settled(found["encoded_3"])
    for outcome in outcomes:
        assert outcome["same"] == outcomes[0]["same"]
        assert outcome["apart"] < 0.2
        for purpose in ("activations", "activation_gradients"):
            plain, encoded = (outcome["sent"][name][purpose] for name in ("plain", "dynamic8"))
            assert 0 < encoded < plain
        assert outcome["sent"]["plain"]["loss"] == outcome["sent"]["dynamic8"]["loss"]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("poisoned_first", "NonFinite: activations of layer 'head.0': "),
        ("poisoned_last", "NonFinite: logits of layer 'head.6': "),
    ],
)
@pytest.mark.parametrize("size", [2, 3])
def test_a_nan_in_one_part_is_told_on_all_ranks(found: Found, case: str, said: str, size: int):
    for outcome in settled(found[f"{case}_{size}"]):
        assert outcome["said"].startswith(said)
        assert f"of rank {size - 1} are NaN" in outcome["said"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One run of two workers, for all tests that only look at what it wrote."""
    home = tmp_path_factory.mktemp("run")
    command = [sys.executable, "-m", "paceline", "train", "lenet5", "--strategy", "subbatch"]
    codec = ("--codec", "activations=dynamic8,activation_gradients=half,gradients=none")
    done = Started([*command, "--workers", "2", *codec, "--json", *QUICK], home).finish(200)
    assert done.code == 0, done.err
    return home / "runs" / json.loads(done.out)["id"]


@pytest.fixture(scope="module")
def result(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def test_a_run_conforms_to_its_plan_and_says_what_travelled(result):
    assert not [fault for fault in result["faults"] if "planned" in fault or "of another" in fault]
    # A rank that loses its core between two marks breaks the order once; a wrong order comes back.
    kinds = Counter(re.sub(r"\bs\d+/|[\d.e-]+ s\b", "", fault) for fault in result["faults"])
    assert not {kind: times for kind, times in kinds.items() if times > FEW_STEPS}, kinds
    assert result["epochs"][-1]["score"] > 0.5
    assert result["head"]["layers"] == ["fc3", "fc4", "fc5"]
    sent = {row["purpose"]: row for row in result["traffic"]}
    for purpose in ("activations", "activation_gradients", "loss", "gradients"):
        # Batches are smaller than the one that is planned, by 2 samples; messages have headers.
        planned, counted = (sent[purpose][one] for one in ("planned_nbytes", "nbytes"))
        if purpose == "loss":  # of two sub-batches, and the labels: little beside their headers
            counted -= 3 * HEADER
        assert counted == pytest.approx(planned, rel=0.05)
    assert sum(result["head"]["own_state_nbytes"]) == result["head"]["state_nbytes"]


def test_one_process_reads_the_model(result, folder):
    model, digits = find("lenet5").build(10), load("digits", (1, 32, 32), 0)
    load_model(model, str(folder / "model.safetensors"))
    inputs, targets = digits.test.__getitems__(range(len(digits.test)))
    with torch.no_grad():
        right = (model.eval()(inputs).argmax(1) == targets).double().mean()
    assert float(right) == pytest.approx(result["epochs"][-1]["score"], abs=0.005)


def test_the_report_has_the_bytes(folder):
    page = (folder / "report.html").read_text()
    assert "Bytes by purpose" in page


def test_a_killed_worker_ends_the_run(start):
    more = ("--strategy", "subbatch", "--profile-s", "0.2", "--epochs", "1000")
    more += ("--deadline-s", "1000")
    training = start("-m", "paceline", "train", "lenet5", "--workers", "2", *more)
    lines = iter(training.process.stderr.readline, "")
    assert any(line.startswith("epoch 1/") for line in lines)
    workers = training.workers()
    killed = time.monotonic()
    os.kill(workers[1], signal.SIGKILL)
    done = training.finish()
    assert time.monotonic() - killed < 500
    assert done.code == 1
    dead = f"worker 1 (process {workers[1]})"
    assert f"paceline: worker 0 stops: {dead} died in the middle of the run" in done.err
    assert "Traceback" not in done.err
