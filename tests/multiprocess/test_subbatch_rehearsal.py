"""Rehearsals of strategy subbatch with real worker processes: its own steps, but paced layers."""

import json

import pytest

pytestmark = pytest.mark.slow

FORWARD_MS, BACKWARD_MS, UPDATE_MS, STEPS = 30.0, 60.0, 4.0, 4
PACE = (
    *("--forward-ms", str(FORWARD_MS), "--backward-ms", str(BACKWARD_MS)),
    *("--update-ms", str(UPDATE_MS), "--steps", str(STEPS)),
)
REHEARSE = ("rehearse", "lenet5", "--device", "p100", "--strategy", "subbatch", *PACE)


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ((), {"activations": None, "activation_gradients": None, "updates": "step"}),
        (
            (
                "--codec",
                "activations=dynamic8,activation_gradients=half",
                "--set",
                "updates=sub-batch",
            ),
            {"activations": "dynamic8", "activation_gradients": "half", "updates": "sub-batch"},
        ),
        (("--set", "sub_batch=10"), {"sub_batch": 10}),
        (("--set", "sub_batch=65", "--set", "updates=sub-batch"), {"sub_batch": 65}),
    ],
)
def test_the_trace_conforms_to_the_plan(paceline, options: tuple[str, ...], config: dict):
    done = paceline(*REHEARSE, "--batch-size", "65", *options, "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert (result["origin"], result["devices"]) == ("rehearsed", "paced as power8-p100/gpu0")
    assert result["plans"][0]["strategy"] == "subbatch"
    assert config.items() <= result["config"].items()
    assert result["faults"] == []
    rows = {row["quantity"]: row for row in result["comparison"]["rows"]}
    # Two workers share the head, each for the samples of both: as long as one with all of it.
    assert rows["forward"]["right_s"] >= 0.99e-3 * FORWARD_MS
    assert rows["backward"]["right_s"] >= 0.99e-3 * BACKWARD_MS
    assert result["step_s"] > 0.99e-3 * (FORWARD_MS + BACKWARD_MS)


def test_what_cannot_be_rehearsed_is_refused(paceline):
    for options, said in (
        (("--stretch", "2"), "stretch: goes not with strategy subbatch"),
        (("--device", "p100", "--codec", "weights=half"), "codec: 'weights' travels by none"),
        (("--device", "p100", "--set", "head=nothing"), "head: lenet5 has no layer 'nothing'"),
        (("--device", "p100", "--set", "sub_batch=1"), "sub_batch: 1 samples do not fit"),
    ):
        done = paceline("rehearse", "lenet5", "--strategy", "subbatch", *options)
        assert done.code == 2
        assert said in done.err, done.err
