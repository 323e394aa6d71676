"""Settings of a run: defaults of models and strategies, and the file run.toml."""

import re
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.defaults import completed
from paceline.core.reading import validated
from paceline.core.settings import Interval, TrainSettings
from paceline.core.strategy import Options
from paceline.records.config_file import FILE_NAME, merged, read_config, to_toml, write_config
from paceline.records.profile import validated_profile
from paceline.records.scale import ScaleSettings
from paceline.records.settings import configuration, validated_rehearsal, validated_settings
from paceline.strategies import EXCHANGES, STRATEGIES, allreduce, find_exchange
from paceline.strategies.allreduce.config import AllReduce
from paceline.training.data.spec import FORMS
from refusals import refused

LENET5 = {"model": "lenet5"}
WHEEL = LENET5 | {"strategy": "wheel"}


def test_options_and_workers_are_fields_of_the_configuration():
    assert configuration(validated_settings(LENET5)) == AllReduce(workers=2)
    options = {"bucket_mb": 5, "gradient_as_bucket_view": False}
    settings = validated_settings(LENET5 | {"workers": 3, "options": options})
    assert configuration(settings) == AllReduce(3, 5, False)


def test_a_codec_needs_no_purpose_if_workers_send_only_gradients():
    for name, expected in (("dynamic8", "dynamic8"), ("none", None)):
        assert configuration(validated_settings(LENET5 | {"codec": name})).codec == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, {"momentum": 0.8}),
        ({"momentum": 0.9}, {"momentum": 0.9}),
        ({"device": "p100"}, {"profile_s": 1}),
        ({"device": "p100", "profile_s": 2.0}, {"profile_s": 2}),
        ({"device": "p100", "strategy": "host"}, {"profile_s": 2}),
    ],
)
def test_a_strategy_has_its_own_defaults_unless_values_are_given(asked: dict, expected: dict):
    validate = validated_rehearsal if "device" in asked else validated_settings
    settings = validate(WHEEL | asked)
    assert {name: getattr(settings, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("model", "given", "expected"),
    [
        ("lenet5", {}, ("digits", "sgd", 0.05, 0.9, "constant")),
        ("alexnet", {}, ("digits", "sgd", 0.001, 0.9, "constant")),
        ("gpt", {}, ("text", "adamw", 1e-3, None, "constant")),
        ("gpt2", {"data": "text:a"}, ("text:a", "adamw", 6e-4, None, "constant")),
        ("vit", {"schedule": "cosine"}, ("digits", "adamw", 1e-3, None, "cosine")),
        # The default learning rate depends on the optimizer.
        ("lenet5", {"optimizer": "Adam"}, ("digits", "Adam", None, None, "constant")),
        ("gpt", {"optimizer": "SGD"}, ("text", "SGD", 0.05, 0.9, "constant")),
        ("lenet5", {"strategy": "auto", "learning_rate": 0.2}, ("digits", "sgd", 0.2, 0.9)),
        ("lenet5", {"optimizer": "a:b", "learning_rate": 1}, ("digits", "a:b", 1, None)),
        ("mine:recipe", {}, (None, None, None, None, None)),  # the recipe may have its own
    ],
)
def test_defaults_suit_the_model(model: str, given: dict, expected: tuple):
    settings = validated_settings({"model": model} | given)
    names = ("data", "optimizer", "learning_rate", "momentum", "schedule")
    found = tuple(getattr(settings, name) for name in names)
    assert found[: len(expected)] == expected
    assert completed(settings) == settings or ":" in model


def test_completed_settings_of_a_recipe_have_the_defaults_of_images():
    like_images = completed(validated_settings({"model": "mine:recipe", "momentum": 0.5}))
    assert (like_images.data, like_images.optimizer) == ("digits", "sgd")
    assert (like_images.learning_rate, like_images.momentum) == (0.05, 0.5)


def test_the_help_of_data_names_all_forms():
    text = TrainSettings.model_fields["data"].description or ""
    assert {form.partition(":")[0] for form in FORMS} <= set(re.findall(r"[\w-]+", text))


def test_a_strategy_may_refuse_a_setting_and_auto_refuses_it_too(monkeypatch):
    options = Options(refused_settings={"accumulate": "no parts"})
    refusing = replace(allreduce.STRATEGY, name="toy", options=options)
    monkeypatch.setitem(STRATEGIES, "toy", refusing)
    toy = LENET5 | {"strategy": "toy"}
    with refused("accumulate"):
        validated_settings(toy | {"accumulate": 2})
    # The default is accepted, because a file with all settings contains it.
    assert validated_settings(toy | {"accumulate": 1}).accumulate == 1
    assert validated_settings(LENET5 | {"strategy": "auto", "accumulate": 2}).accumulate == 2
    monkeypatch.setitem(EXCHANGES, "toy", refusing)
    with refused("accumulate"):
        validated_settings(LENET5 | {"strategy": "auto", "accumulate": 2})


def test_strategies_are_known_by_name_and_refuse_only_what_is_a_setting():
    for name, strategy in STRATEGIES.items():
        assert strategy.name == name
        assert strategy.options.refused_settings.keys() <= TrainSettings.model_fields.keys()
    for name, strategy in EXCHANGES.items():
        assert find_exchange(name) is strategy
    for name in ("wheel", "magic", "refusals:refused", "refusals:none", "no.module:x"):
        with refused("strategy"):
            find_exchange(name)
    with refused("strategy") as caught:
        find_exchange("hots")
    assert "'host'" in caught.value.hint  # the nearest name


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("1", Interval(1, None)),
        ("0.05s", Interval(None, 0.05)),
        ("2 h", Interval(None, 7200)),
        ("never", None),
        (None, Interval(seconds=300)),
    ],
)
def test_an_interval_is_steps_or_seconds(text: str | None, interval: Interval | None):
    settings = validated_settings(LENET5 | {"checkpoint_every": text})
    assert settings.checkpoint_interval == interval


# In tables, the text "null" means None.
WORDS = st.text(max_size=12).filter(lambda text: text != "null")
NUMBERS = st.integers(-(2**62), 2**62) | st.floats(allow_nan=False)
SCALARS = WORDS | NUMBERS | st.booleans() | st.none()
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)
# A value for each setting, other than its default.
TRAIN = (
    {"model": "mine:net", "workers": 3, "batch_size": 96, "data": 'text:it\'s "a" \x7f\n'}
    | {"epochs": 9, "optimizer": "adamw", "learning_rate": 1e-38, "momentum": 0.125}
    | {"optimizer_options": {"betas": [0.5, 0.75], "eps": None, "a b": {"x": True}}}
    | {"schedule": "cosine", "warmup_steps": 3, "precision": "bfloat16", "accumulate": 2}
    | {"clip_norm": 0.1, "evaluate_every": 10**9, "seed": 2**63 - 1, "checkpoint_every": "0.05s"}
    | {"keep_checkpoints": 9, "resume": Path("before"), "max_restarts": 4}
    | {"tensorboard": Path("board")}
    | {"output": Path("there"), "profile_s": 0.001, "deadline_s": 1e6, "strategy": "allreduce"}
    | {"options": {"bucket_mb": None, "codec": "half"}}
)
# Settings of some runs only.
OF_SOME = {
    *("kind", "codec", "balance", "keep_all", "exchange_alone", "listen", "keys"),
    *("run_name", "wait_s", "steps", "elastic", "lighthouse", "worker_ids"),
}


def written(folder: Path, settings_of_run: Any) -> dict[str, Any]:
    """Write the file of these settings; return the values that are read from it."""
    write_config(folder, settings_of_run)
    return read_config(folder / FILE_NAME, type(settings_of_run))


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"epochs": None, "steps": 10**6},
        {"strategy": "auto", "options": None, "keep_all": True, "balance": "auto"},
        {"strategy": "allreduce", "workers": 1, "exchange_alone": True},
        {"strategy": "wheel", "options": {"staleness": None, "head": "", "lanes": 1}}
        | {"accumulate": 1, "listen": "tcp://10.0.0.1:5555", "run_name": "mine"}
        | {"keys": Path("keys"), "wait_s": 0.5},
        {"strategy": "local", "options": {"sync_every": 5}, "elastic": True, "worker_ids": (0, 2)}
        | {"lighthouse": "http://10.0.0.1:29510", "accumulate": 1, "codec": "dynamic4"},
        {"strategy": "hogbatch", "options": {"cpu_batch": [2, 8], "policy": "cpu_gpu"}}
        | {"accumulate": 1, "workers": "cpu:1,cpu:2", "evaluate_every": None},
    ],
)
def test_the_file_of_a_training_gives_the_same_settings(tmp_path: Path, asked: dict):
    assert TRAIN.keys() | OF_SOME == TrainSettings.model_fields.keys()
    wanted = validated_settings(TRAIN | asked)
    again = validated_settings(written(tmp_path, wanted))
    if wanted.steps is not None:  # instead of epochs
        again = again.model_copy(update={"epochs": wanted.epochs})
    assert again == wanted.model_copy(update={"resume": None})  # the file is in this folder


SEARCH = {"forward_ms": 1.5, "strategy": "host", "options": {"chunk": "search"}}
STUDY = {"workers": "1,2,4", "scaling": "weak", "kinds": "predicted"}
CODECS = {"strategy": "subbatch", "codec": "gradients=none,activations=half"}


@pytest.mark.parametrize(
    ("validate", "asked"),
    [
        (validated_rehearsal, {"device": "p100"} | SEARCH),
        (validated_rehearsal, {"slowdown": "1,4", "input_shape": "3x8x8", "balance": "auto"}),
        (validated_rehearsal, {"device": "p100"} | CODECS),
        (partial(validated, ScaleSettings), STUDY),
        (validated_profile, {"largest_batch": "8GiB"}),
    ],
)
def test_the_file_of_a_rehearsal_or_study_gives_the_same_settings(tmp_path, validate, asked):
    wanted = validate(LENET5 | asked)
    assert validate(written(tmp_path, wanted)) == wanted


@given(st.dictionaries(WORDS, VALUES, max_size=5))
def test_written_toml_has_the_same_values_and_types(values: dict[str, Any]):
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
        ("options = 3", "options"),
        ("epochs = ", "is not TOML"),
        (b"\xff\xfe", "is not TOML"),
        (None, "cannot be read"),
    ],
)
def test_an_invalid_file_is_named_with_the_key(tmp_path: Path, text: str | bytes | None, key: str):
    path = tmp_path / "mine.toml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with refused(path) as caught:
        read_config(path, TrainSettings)
    assert caught.value.problem.startswith(key)


@pytest.mark.parametrize(
    ("given_values", "below", "expected"),
    [
        ({"epochs": 1}, {"epochs": 5, "seed": 3}, {"epochs": 1, "seed": 3}),
        ({"steps": 9}, {"epochs": 5}, {"steps": 9}),
        ({"epochs": 9}, {"steps": 5}, {"epochs": 9}),
        ({"slowdown": "2"}, {"device": "p100"}, {"slowdown": "2"}),
        (
            {"codec": "half"},
            {"options": {"codec": "auto", "b": 3}},
            {"codec": "half", "options": {"b": 3}},
        ),
        ({"options": {"a": 1}}, {"options": {"a": 2, "b": 3}}, {"options": {"a": 1, "b": 3}}),
        (
            {"codec": "gradients=half, activations=none"},
            {"options": {"gradients": "dynamic8", "activations": "half", "lanes": 1}},
            {"codec": "gradients=half, activations=none", "options": {"lanes": 1}},
        ),
    ],
)
def test_given_settings_override_those_below(given_values: dict, below: dict, expected: dict):
    assert merged(given_values, below) == expected
