"""Whole runs, and rehearsals, of models whose head is split among workers."""

import json
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model

import language_nets
from faults import failpoints
from paceline.data import load
from paceline.models import find
from processes import Started
from refusals import refused_field

slow = pytest.mark.slow
HEADER = 40
FEW_STEPS = 4  # of 20 that are traced
STRATEGY = ("--strategy", "subbatch")
QUICK = ("--profile-s", "0.2", "--epochs", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One run of two workers, for all tests that only look at what it wrote."""
    home = tmp_path_factory.mktemp("run")
    codec = ("--codec", "activations=dynamic8,activation_gradients=half,gradients=none")
    command = ("-m", "paceline", "train", "lenet5", *STRATEGY, "--workers", "2", *codec)
    done = Started([sys.executable, *command, "--json", *QUICK], home).finish(200)
    assert done.code == 0, done.err
    return home / "runs" / json.loads(done.out)["id"]


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def test_a_run_conforms_to_its_plan_and_says_what_travelled(result, folder: Path):
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
    assert (folder / "report.html").stat().st_size > 0


def test_one_process_reads_the_model(result, folder: Path):
    model, digits = find("lenet5").build(10), load("digits", (1, 32, 32), 0)
    load_model(model, str(folder / "model.safetensors"))
    inputs, targets = digits.test.__getitems__(range(len(digits.test)))
    with torch.no_grad():
        right = (model.eval()(inputs).argmax(1) == targets).double().mean()
    assert float(right) == pytest.approx(result["epochs"][-1]["score"], abs=0.005)


@slow
def test_a_killed_worker_ends_the_run(paceline):
    more = ("--workers", "2", "--profile-s", "0.2", "--epochs", "1000", "--deadline-s", "500")
    with failpoints({"at": "step.done", "worker": 1, "step": 12, "do": "SIGKILL"}):
        done = paceline("train", "lenet5", *STRATEGY, *more)
    assert done.code == 1
    assert "worker 0 stops: worker 1 (" in done.err
    assert "Traceback" not in done.err


@slow
def test_a_recipe_of_tokens_is_trained_and_reported(outcome, tmp_path: Path):
    shutil.copy(language_nets.__file__, tmp_path)
    result = outcome(
        *("train", "language_nets:counting", *STRATEGY, "--workers", "2", "--batch-size", "12"),
        *("--epochs", "3", "--profile-s", "0.2", "--learning-rate", "0.5"),
    )
    assert not [fault for fault in result["faults"] if "planned" in fault or "of another" in fault]
    assert (result["head"]["layers"], result["score"]) == (["head"], "bits per byte")
    first, *_, last = result["epochs"]
    assert last["score"] < 0.5 * first["score"]
    assert result["tokens_per_s"] == pytest.approx(6 * result["samples_per_s"])
    sent = {row["purpose"]: row for row in result["traffic"]}
    # A message has a header; a step has two sub-batches.
    for purpose, num_messages in {"activations": 2, "activation_gradients": 2, "loss": 3}.items():
        counted = sent[purpose]["nbytes"] - HEADER * num_messages
        assert counted == pytest.approx(sent[purpose]["planned_nbytes"])


FORWARD_MS, BACKWARD_MS = 30.0, 60.0
REHEARSE = (
    *("rehearse", "lenet5", "--device", "p100", *STRATEGY, "--steps", "4", "--update-ms", "4"),
    *("--forward-ms", str(FORWARD_MS), "--backward-ms", str(BACKWARD_MS), "--batch-size", "65"),
)
CODECS = {"activations": "dynamic8", "activation_gradients": "half"}
IN_CODES = ("--codec", ",".join(f"{purpose}={codec}" for purpose, codec in CODECS.items()))


@slow
@pytest.mark.parametrize(
    ("options", "config"),
    [
        ((), {"activations": None, "activation_gradients": None, "updates": "step"}),
        ((*IN_CODES, "--set", "updates=sub-batch"), {**CODECS, "updates": "sub-batch"}),
        (("--set", "sub_batch=10"), {"sub_batch": 10}),
        (("--set", "sub_batch=65", "--set", "updates=sub-batch"), {"sub_batch": 65}),
    ],
)
def test_the_trace_of_a_rehearsal_conforms_to_the_plan(outcome, options, config: dict[str, Any]):
    result = outcome(*REHEARSE, *options)
    assert (result["origin"], result["plans"][0]["strategy"]) == ("rehearsed", "subbatch")
    assert config.items() <= result["config"].items()
    assert result["faults"] == []
    rows = {row["quantity"]: row for row in result["comparison"]["rows"]}
    # Two workers share the head, each for the samples of both: as long as one with all of it.
    assert rows["forward"]["right_s"] >= 0.99e-3 * FORWARD_MS
    assert rows["backward"]["right_s"] >= 0.99e-3 * BACKWARD_MS
    assert result["step_s"] > 0.99e-3 * (FORWARD_MS + BACKWARD_MS)


@slow
@pytest.mark.parametrize(
    ("field", "options"),
    [("head", ("--set", "head=nothing")), ("sub_batch", ("--set", "sub_batch=1"))],
)
def test_a_head_that_a_rehearsal_cannot_have_is_refused(paceline, field: str, options):
    done = paceline("rehearse", "lenet5", *STRATEGY, "--device", "p100", *options)
    assert (done.code, refused_field(done.err)) == (2, field)
