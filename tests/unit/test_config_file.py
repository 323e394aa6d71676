"""Settings in run.toml: what is written is read again, and options replace what is read."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.settings import TrainSettings
from paceline.records.config_file import (
    FILE_NAME,
    merged,
    read_config,
    to_toml,
    with_resumed,
    write_config,
)
from paceline.records.profile import validated_profile
from paceline.records.scale import ScaleSettings
from paceline.records.settings import (
    validated,
    validated_rehearsal,
    validated_settings,
)
from refusals import refused

# The text "null" stands for None within tables.
WORDS = st.text(max_size=12).filter(lambda text: text != "null")
NUMBERS = st.integers(-(2**62), 2**62) | st.floats(allow_nan=False)
SCALARS = WORDS | NUMBERS | st.booleans() | st.none()
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)
# A value for each setting that is not its default.
TRAIN = {
    "model": "mine:net",
    "workers": 3,
    "batch_size": 96,
    "data": 'text:it\'s "a" \x7f\n',
    "epochs": 9,
    "optimizer": "adamw",
    "learning_rate": 1e-38,
    "momentum": 0.125,
    "optimizer_options": {"betas": [0.5, 0.75], "eps": None, "a b": {"x": True}},
    "schedule": "cosine",
    "warmup_steps": 3,
    "precision": "bfloat16",
    "accumulate": 2,
    "clip_norm": 0.1,
    "evaluate_every": 10**9,
    "seed": 2**63 - 1,
    "checkpoint_every": "0.05s",
    "keep": 9,
    "resume": Path("before"),
    "restarts": 4,
    "tensorboard": Path("board"),
    "output": Path("there"),
    "profile_s": 0.001,
    "deadline_s": 1e6,
    "strategy": "allreduce",
    "options": {"bucket_mb": None, "codec": "half"},
}
OF_SOME = {
    *("kind", "policy", "codec", "balance", "force", "exchange_alone", "port", "bind", "keys"),
    *("run", "wait_s", "steps"),
}


def written(folder: Path, settings_of_run: Any) -> dict[str, Any]:
    """Return what is read from the file that is written for these settings."""
    write_config(folder, settings_of_run)
    return read_config(folder / FILE_NAME, type(settings_of_run))


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"epochs": None, "steps": 10**6},
        {"strategy": "auto", "options": None, "force": True, "balance": "auto"},
        {"strategy": "host", "options": {"chunk": 2}, "port": 7},
        {"strategy": "allreduce", "workers": 1, "exchange_alone": True},
        {"strategy": "subbatch", "options": {"updates": "sub-batch"}, "accumulate": 1},
        {
            "strategy": "wheel",
            "options": {"staleness": None, "head": "", "lanes": 1},
            "accumulate": 1,
            "bind": "tcp://10.0.0.1:5555",
            "run": "mine",
            "wait_s": 0.5,
            "keys": Path("keys"),
        },
        {
            "strategy": "hogbatch",
            "options": {"cpu_batch": [2, 8], "beta": 0.5},
            "policy": "cpu_gpu",
            "workers": "cpu:1,cpu:2",
            "accumulate": 1,
            "evaluate_every": None,
        },
    ],
)
def test_the_file_of_a_training_gives_the_same_settings(tmp_path: Path, asked: dict):
    assert TRAIN.keys() | OF_SOME == TrainSettings.model_fields.keys()
    wanted = validated_settings(TRAIN | asked)
    again = validated_settings(written(tmp_path, wanted))
    if wanted.steps is not None:  # which are instead of the epochs
        again = again.model_copy(update={"epochs": wanted.epochs})
    assert again == wanted.model_copy(update={"resume": None})  # the folder is the file's own


@pytest.mark.parametrize(
    "asked",
    [
        {"device": "p100", "forward_ms": 1.5, "strategy": "host", "chunk_search": "predicted"},
        {"stretch": "1,4", "input_shape": "3x8x8", "balance": "auto"},
        {"device": "p100", "strategy": "wheel", "options": {"staleness": None, "lanes": 1}},
        {"device": "p100", "strategy": "subbatch", "codec": "gradients=none,activations=half"},
    ],
)
def test_the_file_of_a_rehearsal_gives_the_same_settings(tmp_path: Path, asked: dict):
    wanted = validated_rehearsal({"model": "lenet5"} | asked)
    assert validated_rehearsal(written(tmp_path, wanted)) == wanted


def test_the_files_of_studies_give_the_same_settings(tmp_path: Path):
    scale = validated(
        ScaleSettings, {"model": "mlp", "workers": "1,2,4", "scaling": "weak", "predict": True}
    )
    assert validated(ScaleSettings, written(tmp_path, scale)) == scale
    profile = validated_profile({"model": "mlp", "memory": "8GiB", "largest_batch": True})
    assert validated_profile(written(tmp_path, profile)) == profile


@given(st.dictionaries(WORDS, VALUES, max_size=5))
def test_what_is_written_is_toml_with_the_same_values(values: dict[str, Any]):
    def without_null(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_null(one) for key, one in value.items()}
        if isinstance(value, list):
            return [without_null(one) for one in value]
        return "null" if value is None else value

    found = tomllib.loads(to_toml(values))
    expected = {name: without_null(one) for name, one in values.items() if one != {}}
    assert found == expected
    kinds = {name: type(value) for name, value in expected.items()}
    assert {name: type(value) for name, value in found.items()} == kinds


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("optimiser = 'sgd'", "'optimiser'"),
        ("kind = 'train'", "'kind'"),
        ("epochs = 0", "epochs"),
        ("epochs = 'many'", "epochs"),
        ("checkpoint_every = '5m'", "checkpoint_every"),
        ("options = 3", "options"),
        ("epochs = ", "not TOML"),
        ("epochs = 1\nepochs = 2", "not TOML"),
        (b"\xff\xfe", "not TOML"),
        (None, "cannot be read"),
    ],
)
def test_a_wrong_file_is_named_with_the_key(tmp_path: Path, text: str | bytes | None, key: str):
    path = tmp_path / "mine.toml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with refused(path) as caught:
        read_config(path, TrainSettings)
    assert caught.value.problem.startswith(key)


def test_null_and_steps_are_written_as_words_of_toml(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'checkpoint_every = 500\nworkers = "cpu:1"\n[options]\nstaleness = "null"\nlanes = 1\n'
    )
    assert read_config(path, TrainSettings) == {
        "checkpoint_every": 500,
        "workers": "cpu:1",
        "options": {"staleness": None, "lanes": 1},
    }


@pytest.mark.parametrize(
    ("given_values", "below", "expected"),
    [
        ({}, {"epochs": 5}, {"epochs": 5}),
        ({"epochs": 1}, {"epochs": 5, "seed": 3}, {"epochs": 1, "seed": 3}),
        ({"steps": 9}, {"epochs": 5}, {"steps": 9}),
        ({"epochs": 9}, {"steps": 5}, {"epochs": 9}),
        ({"stretch": "2"}, {"device": "p100"}, {"stretch": "2"}),
        ({"options": {"a": 1}}, {"options": {"a": 2, "b": 3}}, {"options": {"a": 1, "b": 3}}),
        (
            {"optimizer_options": {"eps": 1}},
            {"optimizer_options": {"foreach": False}},
            {"optimizer_options": {"eps": 1, "foreach": False}},
        ),
        (
            {"policy": "adaptive"},
            {"options": {"policy": "cpu_gpu", "beta": 0.5}},
            {"policy": "adaptive", "options": {"beta": 0.5}},
        ),
        (
            {"codec": "gradients=half, activations=none"},
            {"options": {"gradients": "dynamic8", "activations": "half", "lanes": 1}},
            {"codec": "gradients=half, activations=none", "options": {"lanes": 1}},
        ),
    ],
)
def test_what_is_given_replaces_what_is_below(given_values: dict, below: dict, expected: dict):
    kept = dict(below)
    assert merged(given_values, below) == expected
    assert below == kept


def test_what_resumes_nothing_is_left_as_it_is():
    assert with_resumed({"model": "lenet5"}, TrainSettings) == {"model": "lenet5"}
