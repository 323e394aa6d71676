"""Every way in which gradients become ready, with every exchange: the right result, or a refusal.

The cases are in programs/: each trains a model of float64 on two ranks and, on every rank, an
oracle, which is the same model in plain torch on the samples of both. `worst` is the largest
difference between their parameters, and `bits` a digest of the parameters.
"""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from launched import LAUNCH, PROGRAMS
from processes import Started

FILES = (
    "graphs",
    "layouts",
    "loops",
    "hooks",
    "precision",
    "interrupted",
    "copies",
    "differences",
)
EXCHANGES = ("allreduce", "tree", "host")
ON_GPU = "host on a simulated GPU"
# torch has a kernel of its own for LSTMs on GPUs, and no sparse tensors on a simulated one; and
# torch.compile cannot trace its tensors.
NOT_SIMULATED = (
    *("lstm", "sparse_gradients"),
    *("compiled_before", "compiled_after", "compiled_by_blocks"),
)
NAMES = [
    name
    for file in FILES
    for name in re.findall(r"@(?:case|quick)\ndef (\w+)", (PROGRAMS / f"{file}.py").read_text())
]


@dataclass(frozen=True)
class Refused:
    """An error with `message` on all ranks; if `alone`, on one, and others then miss it."""

    message: str
    alone: bool = False


UNUSED = "Unfinished: Expected to have finished reduction"
NO_STEP_BACK = Refused("InvalidInput: exchange: .*tree cannot take a step back", alone=True)
TOO_LATE = Refused(r"InvalidInput: parameter 'b\.weight': .* changed or taken away by a hook after")
TAKEN = Refused(r"InvalidInput: parameter 'b\.weight': its gradient was taken away by another hook")


def other(first: str, second: str) -> Refused:
    return Refused(f"ModelsDiffer: module: .*{first}.* on rank 0, but .*{second}.* on rank 1")


EVERYWHERE = {
    "other_order_of_parameters": other(r"'a\.weight'", r"'b\.weight'"),
    "other_shapes": other(r"'weight' of shape \[3, 6\]", r"'weight' of shape \[4, 6\]"),
    "other_number_of_parameters": Refused("ModelsDiffer: module: rank 0 has 2 .*rank 1 has 1;"),
    "other_types": other("'weight' .*float32", "'weight' .*float64"),
    "other_strides": other(r"strides \[12, 4, 2, 1\]", r"strides \[12, 1, 6, 3\]"),
    "other_frozen_parameters": other(r"'c\.weight' of shape \[6, 6\]", r"\[7, 6\]"),
    "other_buffers": other(r"buffer 'extra' of shape \[3\]", r"\[4\]"),
    "no_parameters": Refused("RuntimeError: .*is not needed when a module"),
    "no_trainable_parameters": Refused("RuntimeError: .*is not needed when a module"),
    "unused_without_being_looked_for": Refused(UNUSED),
    "state_loaded_by_swapping_tensors": Refused(r"(InvalidInput|RuntimeError): [\s\S]*swap"),
}
# torch's DistributedDataParallel wants every parameter used once in every backward pass.
OF_ALLREDUCE = {
    "twice_in_reentrant_checkpoints": Refused("RuntimeError: .*mark a variable ready only once"),
    "failure_in_the_middle": Refused(UNUSED, alone=True),
    "failure_before_any_gradient": Refused("RuntimeError: ", alone=True),
    "failure_after_all_gradients": Refused("RuntimeError: ", alone=True),
    "failure_in_the_first_step": Refused(UNUSED, alone=True),
    "failure_in_the_first_step_on_rank_0": Refused(UNUSED, alone=True),
    "failure_on_all_ranks": Refused(UNUSED),
    "failure_on_all_ranks_in_the_first_step": Refused(UNUSED),
    "failures_by_turns": Refused(UNUSED, alone=True),
    "failures_one_after_another_on_one_rank": Refused(UNUSED, alone=True),
}
# What it does not notice either: ranks drift apart.
UNNOTICED = (
    "two_backwards_of_one_forward",
    "two_forwards_two_backwards",
    "optimizer_in_backward_before_ours",
    "optimizer_in_backward_after_ours",
    "two_models_whose_order_differs_between_ranks",
)
OF_OURS = {
    "optimizer_in_backward_before_ours": TAKEN,
    "optimizer_in_backward_after_ours": TOO_LATE,
    "two_models_whose_order_differs_between_ranks": Refused("InvalidInput: .*the same order"),
}
OF_TREE = {
    "failure_in_the_middle": NO_STEP_BACK,
    "failure_before_any_gradient": NO_STEP_BACK,
    "failure_after_all_gradients": NO_STEP_BACK,
    "failure_on_all_ranks": NO_STEP_BACK,
    "failures_by_turns": NO_STEP_BACK,
    "failures_one_after_another_on_one_rank": NO_STEP_BACK,
}
OF_HOST = {"post_accumulate_hook_that_scales_after_ours": TOO_LATE}
REFUSED = {
    "allreduce": EVERYWHERE | OF_ALLREDUCE,
    "tree": EVERYWHERE | OF_OURS | OF_TREE,
    "host": EVERYWHERE | OF_OURS | OF_HOST,
    ON_GPU: EVERYWHERE | OF_OURS | OF_HOST,
}
# Cases that are compared with something else than the oracle's parameters to the last bits.
TOLERANCE = {"grad_scaler_with_float16_autocast": 1e-6}

Found = dict[tuple[str, str], list[dict]]


def outcomes_of(folder: Path, exchanges: Sequence[str], *names: str) -> Found:
    """Return what came of each case with each exchange, on both ranks."""
    program = [str(PROGRAMS / "readiness.py"), ",".join(exchanges), *names]
    started = Started([sys.executable, "-c", LAUNCH, "2", *program], folder)
    try:
        done = started.finish(300)
    finally:
        started.kill()
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert done.code == 0, f"{done.err}\nafter {rows[-1][:2] if rows else 'nothing'}"
    return {(exchange, name): outcomes for exchange, name, outcomes in rows}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Found:
    own = outcomes_of(tmp_path_factory.mktemp("readiness"), EXCHANGES)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PACELINE_SIMULATED_GPUS", "2")
        names = ",".join(name for name in NAMES if name not in NOT_SIMULATED)
        on_gpu = outcomes_of(tmp_path_factory.mktemp("on_gpu"), ["host"], names)
    return own | {(ON_GPU, name): outcomes for (_, name), outcomes in on_gpu.items()}


def cases():
    for exchange in (*EXCHANGES, ON_GPU):
        for name in NAMES:
            if exchange == ON_GPU and name in NOT_SIMULATED:
                continue
            unnoticed = exchange == "allreduce" and name in UNNOTICED
            mark = pytest.mark.xfail(strict=True, reason="torch does not notice")
            yield pytest.param(exchange, name, marks=[mark] if unnoticed else [])


@pytest.mark.parametrize(("exchange", "name"), list(cases()))
def test_the_result_is_right_or_refused(found: Found, exchange: str, name: str):
    outcomes = found[exchange, name]
    expected = REFUSED[exchange].get(name)
    errors = [outcome["error"] for outcome in outcomes if "error" in outcome]
    if expected is not None:
        matching = [error for error in errors if re.match(expected.message, error)]
        assert len(matching) >= (1 if expected.alone else len(outcomes)), outcomes
        return
    assert not errors
    assert all(outcome.get("worst", 0.0) <= TOLERANCE.get(name, 1e-12) for outcome in outcomes)
    assert outcomes[0].get("bits") == outcomes[1].get("bits")


def test_every_expectation_is_one_of_a_case():
    expected = set(UNNOTICED) | set(TOLERANCE) | {name for one in REFUSED.values() for name in one}
    assert expected | set(NOT_SIMULATED) <= set(NAMES)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_nan_of_one_rank_is_seen_by_all(found: Found, exchange: str):
    assert found[exchange, "nan_on_one_rank"] == [{"nan": True}] * 2


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("name", ["grad_scaler", "grad_scaler_with_float16_autocast"])
def test_all_ranks_skip_the_step_in_which_one_overflows(found: Found, exchange: str, name: str):
    for outcome in found[exchange, name]:
        assert outcome["scales"] == [1024.0, 512.0, 512.0, 512.0]
        assert outcome["skipped"] == [False, True, False, False]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_cases_have_met_what_they_are_about(found: Found, exchange: str):
    assert all(row["least_norm"] > 0.02 for row in found[exchange, "clipping"])
    # Four steps of the first hook, two of the one that comes later; the oracle's, too.
    reads = {row["read"] for row in found[exchange, "post_accumulate_hooks_that_read"]}
    assert reads == {4 + 2 + 4 + 2}
    assert [row["failed"] for row in found[exchange, "failure_in_forward"]] == [0, 1]
    assert all(row["same"] == [True, True] for row in found[exchange, "buffers_of_several_types"])
    assert all(row["kept"] for row in found[exchange, "closed"])


@pytest.mark.parametrize(
    ("name", "caught"),
    [
        ("failure_in_the_middle", [[[2, "StepDiscarded"]], [[2, "Failure"]]]),
        ("failure_before_any_gradient", [[[2, "StepDiscarded"]], [[2, "Failure"]]]),
        ("failure_after_all_gradients", [[[2, "StepDiscarded"]], [[2, "Failure"]]]),
        ("failure_in_the_first_step", [[[0, "StepDiscarded"]], [[0, "Failure"]]]),
        ("failure_in_the_first_step_on_rank_0", [[[0, "Failure"]], [[0, "StepDiscarded"]]]),
        ("failure_on_all_ranks", [[[2, "Failure"]]] * 2),
        (
            "failures_by_turns",
            [
                [[1, "StepDiscarded"], [2, "Failure"], [3, "StepDiscarded"], [4, "Failure"]],
                [[1, "Failure"], [2, "StepDiscarded"], [3, "Failure"], [4, "StepDiscarded"]],
            ],
        ),
    ],
)
def test_host_discards_a_step_on_all_ranks(found: Found, name: str, caught):
    for exchange in ("host", ON_GPU):
        assert [outcome["caught"] for outcome in found[exchange, name]] == caught


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_states_have_the_names_of_ddp_and_both_are_loaded(found: Found, exchange: str):
    for outcome in found[exchange, "state_dict_round_trip"]:
        assert outcome["names"]
        assert outcome["plain"]
    for outcome in found[exchange, "nested_in_a_parent"]:
        assert outcome["trained"] <= 1e-12


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_statistics_and_timeline_say_what_was_done(found: Found, exchange: str):
    kinds = {
        "allreduce": {"forward", "step"},
        "tree": {"forward", "backward", "send", "step"},
        "host": {"forward", "backward", "d2h", "reduce", "step"},
    }
    for outcome in found[exchange, "statistics_and_timeline"]:
        statistics, total = outcome["statistics"], 5 * outcome["gradient_bytes"]
        assert (statistics["exchange"], statistics["num_steps"]) == (exchange, 5)
        assert outcome["why"] == f"{exchange}: asked for"
        sent, received = statistics["bytes_sent"], statistics["bytes_received"]
        # The tree's gradients have a flag of their type for each parameter.
        margin = 5 * 8 * 6 if exchange == "tree" else 0
        assert total <= min(sent, received) <= max(sent, received) <= total + margin
        assert statistics["chunk"] == (1 if exchange == "host" else None)
        if exchange != "allreduce":
            assert statistics["exposed_s"] > 0
            assert statistics["hidden_s"] >= 0
        assert (outcome["origin"], outcome["start"], outcome["backwards"]) == ("measured", 0.0, 0)
        assert kinds[exchange] <= set(outcome["kinds"])
    assert found[exchange, "statistics_and_timeline"][0]["steps"] == 5
