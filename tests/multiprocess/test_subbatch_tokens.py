"""A language model whose head is split by its vocabulary, against one process; and whole runs."""

import json
import shutil

import pytest

from launched import PROGRAMS, Found, run

pytestmark = pytest.mark.slow

RECIPE = '''
import torch
from paceline.recipes.recipe import Recipe
from paceline.recipes.losses import bits_per_byte, next_token_loss
from subbatch_tokens_net import VOCABULARY, Language


class Counting(torch.utils.data.Dataset):
    """Tokens that count up, of which the first two of each sample ask for nothing."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        tokens = (index + torch.arange(7)) % VOCABULARY
        targets = tokens[1:].clone()
        targets[:2] = -100
        return tokens[:-1], targets


def counting():
    return Recipe(
        model=Language,
        train=Counting(120),
        test=Counting(30),
        loss=next_token_loss,
        score=bits_per_byte,
    )
'''


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Found:
    """What came of all cases, each for the first so many of three ranks."""
    return run(tmp_path_factory.mktemp("three"), 3, "subbatch_tokens.py")


def settled(outcomes: list[dict]) -> list[dict]:
    assert not [one["error"] for one in outcomes if "error" in one]
    return outcomes


@pytest.mark.parametrize(
    "case",
    [
        *("adamw_1", "adamw_2", "adamw_3", "sgd_2", "sgd_3", "clipped_2", "clipped_3"),
        *("masked_2", "masked_3"),
    ],
)
def test_steps_are_those_of_one_process_with_the_whole_batch(found: Found, case: str):
    """Targets of -100 lie unevenly: some ranks and some sub-batches have hardly any others."""
    outcomes = settled(found[case])
    assert outcomes[0]["worst"] < 1e-12
    for outcome in outcomes:
        errors = {name: value for name, value in outcome.items() if name != "worst"}
        assert max(errors.values()) < 1e-13, errors


@pytest.mark.parametrize("size", [2, 3])
def test_updates_per_sub_batch_are_by_the_mean_over_its_own_tokens(found: Found, size: int):
    assert settled(found[f"each_{size}"])[0]["worst"] < 1e-13


def test_tokens_that_travel_encoded_train_alike_on_all_ranks(found: Found):
    outcomes = settled(found["encoded_3"])
    for outcome in outcomes:
        assert outcome["same"] == outcomes[0]["same"]
        assert outcome["apart"] < 0.05


@pytest.mark.parametrize("size", [1, 2])
def test_bfloat16_is_that_of_autocast(found: Found, size: int):
    for outcome in settled(found[f"bfloat16_{size}"]):
        assert outcome["types"] == ["torch.bfloat16"]
        assert outcome["kept"] == ["torch.float32"]
        assert outcome["apart"] < 5e-3
        assert outcome["encoded"]  # what travels is rounded already


@pytest.mark.parametrize("size", [2, 3])
def test_a_traced_run_conforms_and_sends_what_is_planned(found: Found, size: int):
    for outcome in settled(found[f"planned_{size}"]):
        assert outcome["faults"] == []
        # A byte is lost where a ring's share of the gradients is rounded down.
        assert outcome["sent"] == pytest.approx(outcome["planned"], abs=1)


@pytest.mark.parametrize("case", ["", "_each", "_onebit"])
def test_two_ranks_go_on_with_the_bits_of_two(found: Found, case: str):
    """Whatever the head's updates, and with what a codec of gradients has left out so far."""
    before, after = (settled(found[f"{name}{case}_2"])[0] for name in ("left", "went_on"))
    assert before == after
    assert before["steps"] == 10


@pytest.mark.parametrize("size", [1, 3])
def test_another_number_of_ranks_goes_on_as_two_would(found: Found, size: int):
    before, after = settled(found["left_2"])[0], settled(found[f"went_on_{size}"])[0]
    assert after["losses"] == pytest.approx(before["losses"], rel=1e-5)
    assert before["tensors"].keys() == after["tensors"].keys()
    assert any("exp_avg_sq" in name for name in before["tensors"])
    for name, values in before["tensors"].items():
        assert after["tensors"][name] == pytest.approx(values, rel=1e-3, abs=1e-5), name


def test_a_recipe_of_tokens_is_trained_and_reported(paceline, tmp_path):
    (tmp_path / "counting.py").write_text(RECIPE)
    shutil.copy(PROGRAMS / "subbatch_tokens_net.py", tmp_path)
    done = paceline(
        *("train", "counting:counting", "--strategy", "subbatch", "--workers", "2"),
        *("--batch-size", "12", "--epochs", "3", "--profile-s", "0.2", "--learning-rate", "0.5"),
        "--json",
    )
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert not [fault for fault in result["faults"] if "planned" in fault or "of another" in fault]
    assert result["head"]["layers"] == ["head"]
    assert result["score"] == "bits per byte"
    first, *_, last = result["epochs"]
    assert last["score"] < 0.5 * first["score"]
    assert result["tokens_per_s"] == pytest.approx(6 * result["samples_per_s"])
    sent = {row["purpose"]: row for row in result["traffic"]}
    # A message's header has 40 bytes; a step has two sub-batches.
    for purpose, num_messages in {"activations": 2, "activation_gradients": 2, "loss": 3}.items():
        row = sent[purpose]
        assert row["nbytes"] - 40 * num_messages == pytest.approx(row["planned_nbytes"])
