"""Whole rehearsals of strategy local: the real hub, workers and exchanges, and paced layers."""

import json
from pathlib import Path

import pytest

from paceline.record.trace import read_trace

pytestmark = pytest.mark.slow

FORWARD_MS, BACKWARD_MS, UPDATE_MS = 4.0, 8.0, 1.0
PACE = (
    *("--device", "p100", "--forward-ms", str(FORWARD_MS)),
    *("--backward-ms", str(BACKWARD_MS), "--update-ms", str(UPDATE_MS)),
)
REHEARSE = ("rehearse", "lenet5", "--strategy", "local", "--profile-s", "0.2", "--json")


@pytest.mark.parametrize(
    "options",
    [
        ("--set", "sync_every=6"),
        ("--set", "sync_every=12", "--set", "fragments=2", "--set", "delay=2"),
        ("--set", "sync_every=6", "--set", "codec=dynamic8"),
    ],
    ids=["rounds", "streaming", "codec"],
)
def test_a_rehearsal_takes_the_devices_times_and_conforms_to_the_plan(
    paceline, tmp_path: Path, options: tuple[str, ...]
) -> None:
    done = paceline(*REHEARSE, *PACE, "--steps", "24", *options)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert (result["origin"], result["devices"]) == ("rehearsed", "paced as power8-p100/gpu0")
    assert (result["faults"], result["lost"], result["epochs"]) == ([], [], [])
    assert result["step_s"] >= 0.99e-3 * (FORWARD_MS + BACKWARD_MS + UPDATE_MS)
    (folder,) = (tmp_path / "runs").iterdir()
    assert set(read_trace(folder / "trace.json")) == {"predicted", "rehearsed"}
    assert not (folder / "model.safetensors").exists()


def test_a_worker_that_is_four_times_as_fast_takes_more_inner_steps(paceline) -> None:
    asked = ("--stretch", "1,4", "--balance", "auto", "--set", "sync_every=20", "--steps", "60")
    done = paceline(*REHEARSE, *asked, "--profile-s", "1")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["devices"] == "stretched 1, 4 times"
    assert (result["faults"], result["lost"]) == ([], [])
    fast, slow = result["shares"]
    assert fast + slow == 64
    # Four times by the layers; other processes of the machine may slow one of the two down.
    assert fast > 1.5 * slow
    assert "worker 0, which computes" in done.err
    assert "with it all reach" in done.err


def test_equal_parts_are_equal_though_a_worker_is_slower(paceline) -> None:
    asked = ("--stretch", "1,4", "--set", "sync_every=5", "--steps", "15")
    done = paceline(*REHEARSE, *asked)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert (result["faults"], result["lost"], result["shares"]) == ([], [], None)


def test_a_declared_share_of_the_outer_gradients_travels_and_is_checked(paceline) -> None:
    codec, num_values = "threshold:0.001@0.1", 61_706
    own = ("--steps", "12", "--set", "sync_every=6", "--set", f"codec={codec}")
    done = paceline(*REHEARSE, *PACE, *own)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["faults"] == []
    assert result["sent_share"]["measured"] == round(0.1 * num_values) / num_values
    assert result["sent_share"]["warning"] is None
    assert (
        f"nothing is known of the cost in loss of rounds of 6 steps on 2 workers with {codec}"
        in (done.err)
    )
