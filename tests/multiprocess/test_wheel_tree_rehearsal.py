"""Rehearsals of trees of hubs: real hubs, bodies and wire, with the bytes of formula and plan."""

import json
import re

import pytest

from processes import Started

pytestmark = pytest.mark.slow

FORWARD_S, BACKWARD_S, UPDATE_S, STEPS = 0.010, 0.020, 0.002, 6
ALL_STEPS = 2 + STEPS + 1  # with those that are not measured
REHEARSE = (
    *("rehearse", "lenet5", "--strategy", "wheel", "--device", "p100", "--batch-size", "48"),
    *("--forward-ms", "10", "--backward-ms", "20", "--update-ms", "2", "--steps", str(STEPS)),
    *("--profile-s", "0.05", "--json"),
)
BODY = 6 * 25 + 6 + 16 * 6 * 25 + 16  # values: two convolutions
HEAD = 400 * 120 + 120 + 120 * 84 + 84 + 84 * 10 + 10  # and three matrices
CROSSING, SHARE = 400, 0.02  # values of a sample; of the body's gradients


def result_of(done) -> dict:
    assert done.code == 0, done.err
    assert "Traceback" not in done.err
    return json.loads(done.out)


def listening(hub: Started) -> str:
    """Return where a hub listens."""
    for text in iter(hub.process.stderr.readline, ""):
        if found := re.search(r"listening on (tcp://\S+);", text):
            return found[1]
    raise AssertionError("the hub has ended")


def test_a_tree_in_step_sends_the_bytes_of_the_formula_and_of_its_plan(paceline):
    tree = ("--workers", "4", "--set", "child_hubs=2", "--set", "lanes=1", "--set", "staleness=0")
    codec = f"threshold:0.5@{SHARE}"
    result = result_of(paceline(*REHEARSE, *tree, "--set", f"gradients={codec}"))
    assert (result["origin"], result["lost"], result["faults"]) == ("rehearsed", [], None)
    # Every child sends the mean of its two workers' gradients once a step.
    exchanges = 2 * ALL_STEPS
    assert result["updates"]["count"] == exchanges
    sent = 4 + 4 * round(SHARE * BODY)
    of_worker = {
        "labels": 4 * 12,
        "activations": 4 * 12 * CROSSING,
        "activation_gradients": 4 * 12 * CROSSING,
        "parameters": 4 * BODY,
        "gradients": sent,
    }
    expected = {name: 4 * ALL_STEPS * nbytes for name, nbytes in of_worker.items()}
    expected |= {
        "head_parameters": 4 * ALL_STEPS * 4 * HEAD,
        "head_gradients": 4 * ALL_STEPS * 4 * HEAD,
        "hubs_gradients": exchanges * 4 * BODY,
        "hubs_head_gradients": exchanges * 4 * HEAD,
        # A child fetches them once before the first step.
        "hubs_parameters": (exchanges + 2) * 4 * BODY,
        "hubs_head_parameters": (exchanges + 2) * 4 * HEAD,
    }
    assert {row["purpose"]: row["nbytes"] for row in result["traffic"]} == expected
    assert all(row["planned_nbytes"] == row["nbytes"] for row in result["traffic"])
    # All processes are on one host, whose link with itself carries everything.
    (planned,) = result["plans"][0]["link_nbytes_per_step"].values()
    assert planned == 4 * sum(of_worker.values()) + 2 * 2 * 4 * (BODY + HEAD)
    assert result["sent_share"]["measured"] == pytest.approx(round(SHARE * BODY) / BODY, rel=1e-12)
    # Two bodies share a child's head; and the root takes two updates in a step.
    least_s = FORWARD_S + BACKWARD_S + 2 * UPDATE_S
    assert result["step_s"] >= least_s
    assert result["predicted_step_s"] >= 0.95 * least_s
    assert result["plans"][0]["config"]["child_hubs"] == 2


def test_children_that_gather_longer_send_as_much_less(paceline):
    tree = ("--workers", "4", "--set", "child_hubs=2", "--set", "gather=3")
    result = result_of(paceline(*REHEARSE, *tree))
    counted = {row["purpose"]: row["nbytes"] for row in result["traffic"]}
    # Two workers' steps, three at a time; what is gathered while a mean is away may be more.
    assert 0 < counted["hubs_gradients"] <= 2 * (2 * ALL_STEPS // 3) * 4 * BODY
    assert counted["gradients"] == 4 * ALL_STEPS * 4 * BODY
    assert result["step_s"] >= FORWARD_S + BACKWARD_S


def test_hubs_of_elsewhere_rehearse_what_the_root_has_declared(start, paceline):
    bind = ("--bind", "tcp://127.0.0.1:0", "--run", "stage")
    tree = ("--workers", "2", "--set", "child_hubs=1", "--set", "lanes=2")
    root = start("-m", "paceline", *REHEARSE, *tree, *bind)
    joining = ("--connect", listening(root), *bind)
    other = paceline("hub", *joining, "--workers", "4")
    assert other.code == 2
    assert "workers: child hubs of the rehearsal there have 2, and this one 4" in other.err
    child = start("-m", "paceline", "hub", *joining, "--json")
    own = ("--run", "stage", "--device", "cpu", "--threads", "1")
    worker = start("-m", "paceline", "worker", "--connect", listening(child), *own)
    result, below = result_of(root.finish()), result_of(child.finish(20))
    assert worker.finish(20).code == 0
    assert result["updates"]["count"] == below["num_pushed"] == ALL_STEPS
    counted = {row["purpose"]: row["nbytes"] for row in result["traffic"]}
    assert counted["gradients"] == 2 * ALL_STEPS * 4 * BODY
    assert result["predicted_step_s"] > 0


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("--set", "child_hubs=3"), "child_hubs: 4 workers cannot be shared equally by 3"),
        (("--set", "gather=3"), "gather: goes only with child_hubs"),
        (
            ("--set", "child_hubs=2", "--set", "gather=20"),
            "steps: a child hub sends the mean of 20 steps of its 2 workers at a time; rehearse at "
            "least 47",
        ),
    ],
)
def test_trees_that_cannot_be_rehearsed_are_refused(paceline, asked, message):
    done = paceline(*REHEARSE, "--workers", "4", *asked)
    assert (done.code, "Traceback" in done.err) == (2, False)
    assert message in done.err


def test_a_training_does_not_start_child_hubs(paceline):
    done = paceline("train", "lenet5", "--strategy", "wheel", "--set", "child_hubs=2")
    assert done.code == 2
    assert "of a training each is started by itself, as paceline hub --connect" in done.err
