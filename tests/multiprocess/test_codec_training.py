"""Training with gradients that travel encoded, in DistributedDataParallel and in DataParallel."""

import json
import sys
from itertools import pairwise

import pytest
from torch import nn

from launched import PROGRAMS, Found, run, same
from paceline import DataParallel
from paceline.codecs.feedback import OneBit
from paceline.core.errors import InvalidInput
from processes import Started

pytestmark = pytest.mark.slow

SIZE = 3
POISONED = 2  # the step in which a gradient of the last rank is not finite
LOST_DEADLINE_S, MARGIN_S = 5.0, 20.0  # of a machine that others use, too
LOST = {"SIGKILL": "dynamic8", "SIGSTOP": "onebit"}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Found:
    """What came of all cases."""
    return run(tmp_path_factory.mktemp("three"), SIZE, "codec_hooks.py")


@pytest.mark.parametrize("codec", ["dynamic8", "linear8", "e3m0"])
@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("cap_mb", [None, 0.001])
def test_gradients_are_nearly_those_of_one_process(found: Found, codec: str, view, cap_mb):
    """Through two micro-batches a step, and buckets that torch makes anew after the first."""
    outcome = same(found[f"hook_right_{codec}_{view}_{cap_mb}"])
    assert 0.05 < outcome["worst"] <= 1
    assert len(outcome["bits"]) == len(outcome["buckets"]) == 5
    lengths = [1] * 5 if cap_mb is None else [1, 4, 4, 4, 4]
    assert [len(buckets) for buckets in outcome["buckets"]] == lengths
    assert {sum(buckets) for buckets in outcome["buckets"]} == {16_549}


def test_exchange_allreduce_has_the_same_bits_as_the_hook(found: Found):
    outcome = same(found["right_gradients"])
    assert outcome["bits"] == same(found["hook_right_dynamic8_True_None"])["bits"]
    assert outcome["codec"] == "dynamic8/1024: asked for"
    whole = 4 * 16_549 * 2 * (SIZE - 1) // SIZE  # a ring's bytes of float32
    assert [sent / (step * whole) for step, sent in enumerate(outcome["sent"], 1)] == (
        pytest.approx([0.25] * 5, rel=0.02)
    )


def test_a_group_of_some_ranks(found: Found):
    first, *others = found["hook_a_group_of_some_ranks"]
    assert 0.05 < first["worst"] <= 1
    assert 0.05 < same(others)["worst"] <= 1


def test_bfloat16_stays_bfloat16(found: Found):
    outcome = same(found["hook_bfloat16"])
    assert outcome["dtypes"] == ["torch.bfloat16"]
    assert outcome["worst"] <= 1


@pytest.mark.parametrize("name", ["hook_float64", "float64"])
def test_float64_is_refused_on_all_ranks(found: Found, name: str):
    for outcome in found[name]:
        assert outcome["error"].startswith("InvalidInput: codec: gradients of torch.float64 would")


def test_what_a_skipped_step_has_lost_is_not_made_up_for(found: Found):
    outcome = same(found["hook_feedback_after_a_skipped_step"])
    assert outcome["skipped"] == 1
    assert max(outcome["largest"]) < 10


def test_errors_of_parameters_in_another_order_are_dropped(found: Found):
    for outcome in found["hook_buckets_made_anew"]:
        assert outcome["owed"] > 0.01
        assert outcome["largest"] == 0
        assert len(set(outcome["lengths"])) == 1


def test_the_state_of_the_hook_is_what_it_takes_to_go_on(found: Found):
    going_on, loaded, without = same(found["hook_checkpoint"])["chains"]
    assert loaded == going_on
    assert without != going_on


@pytest.mark.parametrize("codec", ["dynamic8", "half"])
def test_all_ranks_skip_what_a_grad_scaler_skips(found: Found, codec: str):
    outcome = same(found[f"hook_grad_scaler_{codec}"])
    assert outcome["finite"]
    counts = [0, *outcome["counts"]]
    grown = [late > early for early, late in pairwise(counts)]
    assert outcome["changed"] == [not skipped for skipped in grown]
    scale, expected = {"dynamic8": 2.0**10, "half": 2.0**21}[codec], []
    for skipped in grown:
        scale /= 2 if skipped else 1
        expected.append(scale)
    assert outcome["scales"] == expected
    assert grown[POISONED]
    if codec == "dynamic8":
        assert grown.count(True) == 1
    else:  # which cannot hold what is scaled so much: the scale is halved until it can
        assert grown[0]
        assert grown[POISONED + 1 :] == [False] * 4


def test_what_a_grad_scaler_skips_is_no_error_for_another_model(found: Found):
    changed = same(found["hook_two_scaled_models"])["changed"]
    assert changed == [[step != POISONED, True] for step in range(5)]


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_gradients_of_a_closure_are_looked_at_before_they_are_used(found: Found, policy: str):
    outcome = same(found[f"hook_closure_{policy}"])
    assert outcome["changed"] == [step != POISONED for step in range(5)]
    assert outcome["raised"] == ([POISONED] if policy == "raise" else [])
    assert outcome["skipped"] == (1 if policy == "skip" else 0)


def poisoned(outcomes: list[dict]) -> dict:
    """What came of six steps, one of which nobody takes, on any rank."""
    outcome = same(outcomes)
    assert outcome["changed"] == [step != POISONED for step in range(6)]
    assert outcome["finite"]
    assert outcome["counts"][0] >= 1
    return outcome


@pytest.mark.parametrize("name", ["nan_raises", "infinity_raises_by_default"])
def test_what_is_not_finite_raises_on_all_ranks_and_changes_nothing(found: Found, name: str):
    outcome = poisoned(found[name])
    ((step, _, said),) = outcome["raised"]
    assert step == POISONED
    assert said.startswith("gradients: 1 values so far were NaN or infinite on some rank")
    assert outcome["counts"] == [1, 0]
    assert outcome["bits"] == outcome["without"]


@pytest.mark.parametrize("name", ["nan_is_skipped", "infinity_is_skipped"])
def test_what_is_not_finite_is_skipped_on_all_ranks_if_so_told(found: Found, name: str):
    outcome = poisoned(found[name])
    assert outcome["raised"] == []
    assert outcome["counts"] == [1, 1]
    assert outcome["bits"] == outcome["without"]


@pytest.mark.parametrize("order", ["", "_of_whom_the_second_has_it"])
def test_two_optimizers_take_a_step_together_or_not_at_all(found: Found, order: str):
    skipped = poisoned(found[f"two_optimizers_skip{order}"])
    assert skipped["raised"] == []
    assert skipped["counts"][1] == 1
    raised = poisoned(found[f"two_optimizers_raise{order}"])
    assert {step for step, _, _ in raised["raised"]} == {POISONED}
    scaled = poisoned(found[f"two_optimizers_of_a_grad_scaler{order}"])
    assert (scaled["raised"], scaled["scale"]) == ([], 512.0)


@pytest.mark.parametrize("name", ["grad_scaler", "grad_scaler_of_a_fused_optimizer"])
def test_a_grad_scaler_skips_the_step_without_an_error(found: Found, name: str):
    outcome = poisoned(found[name])
    assert (outcome["raised"], outcome["scale"]) == ([], 512.0)


@pytest.mark.parametrize(
    ("name", "codecs"),
    [
        ("hook_refused_other", ["dynamic8/1024", "half", "dynamic8/1024"]),
        ("hook_refused_auto_on_one", ["auto", "dynamic8/1024", "dynamic8/1024"]),
    ],
)
def test_ranks_with_different_codecs_are_named_on_all(found: Found, name: str, codecs: list[str]):
    for rank, outcome in enumerate(found[name]):
        other = next(i for i, codec in enumerate(codecs) if codec != codecs[rank])
        assert outcome["said"] == (
            f"InvalidInput: codec: rank {other} has another than rank {rank}, which has "
            f"{codecs[rank]!r}; give all ranks the same"
        )
        assert outcome["threads"] == 0


def test_ranks_of_exchange_allreduce_with_different_codecs_are_named_on_all(found: Found):
    for rank, outcome in enumerate(found["other_codecs"]):
        assert outcome["error"].startswith("InvalidInput: codec: rank ")
        assert f"has another than rank {rank}, which has" in outcome["error"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unknown", "codec: 'fp8' is not known; choose one of dynamic8, static8,"),
        ("a_number", "codec: 8 is neither the name of one nor a codec"),
        ("nothing", "codec: None is neither the name of one nor a codec"),
        ("a_class", "codec: <class 'paceline.codecs.feedback.OneBit'> is neither the name of one"),
    ],
)
def test_what_is_no_codec_is_refused_by_the_hook(found: Found, name: str, message: str):
    outcome = same(found[f"hook_refused_{name}"])
    assert outcome["said"].startswith(f"InvalidInput: {message}")
    assert outcome["threads"] == 0


def test_an_unknown_policy_is_refused_by_the_hook(found: Found):
    for outcome in found["hook_unknown_policy"]:
        assert outcome["error"].startswith("InvalidInput: on_nonfinite: 'ignore' is not known;")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codec": "fp8"}, "codec: 'fp8' is not known; choose one of"),
        ({"codec": "threshold:-1"}, "codec: 'threshold:-1': TAU must be a positive number"),
        ({"codec": 8}, "codec: 8 is neither the name of one nor a codec"),
        ({"codec": OneBit}, "OneBit'> is neither the name of one nor a codec"),
        ({"codec": "half", "exchange": "tree"}, "codec: exchange 'tree' has none; choose 'host'"),
        ({"codec": "half", "on_nonfinite": "ignore"}, "on_nonfinite: 'ignore' is not known"),
    ],
)
def test_what_is_no_codec_is_refused_by_data_parallel(options, message):
    with pytest.raises(InvalidInput, match=message):
        DataParallel(nn.Linear(3, 2), **options)


def test_the_host_of_one_machine_encodes_nothing(found: Found):
    outcome = same(found["host_on_one_machine"])
    assert outcome["digests"][0] == outcome["digests"][1]
    assert outcome["codec"] is None


def test_ranks_try_both_ways_together_and_stay_with_one(found: Found):
    outcome = same(found["hook_the_codec_that_pays"])
    assert outcome["worst"] <= 1
    assert outcome["sent"][0] == 0  # what was measured is no gradient
    sent = [late - early for early, late in pairwise(outcome["sent"])]
    encoded, plain = min(sent), max(sent)
    assert plain > 3.9 * encoded
    assert set(sent) == {encoded, plain}
    assert min(sent[4:20].count(encoded), sent[4:20].count(plain)) >= 7
    with_codec = outcome["verdicts"][-1] == "dynamic8"
    assert outcome["verdicts"][-1] in ("dynamic8", "none")
    assert set(sent[20:]) == {encoded if with_codec else plain}
    assert "because steps took" in outcome["why"]


def test_the_codec_that_pays_in_exchange_allreduce(found: Found):
    outcome = same(found["auto"])
    assert outcome["worst"] <= 1
    assert outcome["before"].startswith("dynamic8 where it pays, until steps are tried without; ")
    assert outcome["codec"].startswith(("dynamic8, because steps took", "none, because steps took"))


@pytest.fixture(scope="module")
def lost(tmp_path_factory) -> dict[str, dict]:
    """How the others end when a rank is struck in a backward pass."""
    runs = [[codec, name] for name, codec in LOST.items()]
    command = [sys.executable, str(PROGRAMS / "codec_lost.py"), json.dumps(runs)]
    started = Started(command, tmp_path_factory.mktemp("lost"))
    try:
        done = started.finish()
        assert done.code == 0, done.err
        assert not started.members()
    finally:
        started.kill()
    return dict(zip(LOST, map(json.loads, done.out.splitlines()), strict=True))


@pytest.mark.parametrize("name", LOST)
def test_when_a_rank_is_lost_the_others_end_with_an_error(lost: dict[str, dict], name: str):
    assert set(lost[name]) == {"0", "2"}
    for outcome in lost[name].values():
        assert outcome["code"] == 3, outcome  # and no signal: nothing crashes on the way out
        assert any(mark in outcome["error"] for mark in ("Connection", "Timed out")), outcome
        assert outcome["after_s"] < LOST_DEADLINE_S + MARGIN_S


def test_the_command_line_trains_with_a_codec(paceline):
    options = ("--strategy", "allreduce", "--set", "codec=dynamic8", "--epochs", "1")
    done = paceline("train", "lenet5", *options, "--profile-s", "0.2", "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["accuracy"] > 0.5  # of ten digits
    assert result["faults"] == []
    (plan,) = (plan for plan in result["plans"] if plan["strategy"] == "allreduce")
    # Each of two ranks sends half of 61,706 gradients to be summed, and the means of the others.
    half = 61_706 // 2
    assert plan["wire_nbytes_per_step"] == 2 * 2 * (half + 4 * -(-half // 1024))


def test_the_command_line_refuses_an_unknown_codec(paceline):
    done = paceline("train", "lenet5", "--strategy", "allreduce", "--set", "codec=fp8")
    assert done.code == 2
    assert "codec" in done.err
    assert "'fp8' is not known; choose one of dynamic8" in " ".join(done.err.split())
