"""Settings of a run: what suits the model and the strategy unless somebody asks for another."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from paceline.core.defaults import completed, usual_for
from paceline.core.interval import Interval
from paceline.core.settings import TrainSettings
from paceline.data.spec import FORMS
from paceline.records.settings import configuration, validated_rehearsal, validated_settings
from paceline.strategies import EXCHANGES, STRATEGIES, allreduce, find_exchange
from paceline.strategies.allreduce.config import AllReduce
from refusals import refused

LENET5 = {"model": "lenet5"}
WHEEL = LENET5 | {"strategy": "wheel"}


def test_what_is_not_given_has_a_value():
    settings = validated_settings(LENET5)
    assert (settings.data, settings.strategy, settings.workers) == ("digits", "allreduce", 2)
    assert configuration(settings) == AllReduce(workers=2, bucket_mb=None)
    assert configuration(settings).gradient_as_bucket_view is True
    assert settings.output == Path("runs")
    options = {"bucket_mb": 5, "gradient_as_bucket_view": False}
    settings = validated_settings(LENET5 | {"workers": 3, "options": options})
    assert configuration(settings) == AllReduce(3, 5, False)


@pytest.mark.parametrize("strategy", ["allreduce", "host", "local"])
def test_the_codec_of_gradients_is_named_by_itself_where_nothing_else_travels(strategy: str):
    given = {"model": "gpt", "strategy": strategy}
    for name, expected in (("dynamic8", "dynamic8"), ("none", None)):
        assert configuration(validated_settings(given | {"codec": name})).codec == expected


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
        ("gpt2", {}, ("text", "adamw", 6e-4, None, "constant")),
        ("bert", {"data": "masked-text:a"}, ("masked-text:a", "adamw", 1e-3, None, "constant")),
        ("bert-base", {}, ("masked-text", "adamw", 1e-4, None, "constant")),
        ("vit", {"schedule": "cosine"}, ("digits", "adamw", 1e-3, None, "cosine")),
        # A rate belongs to an optimizer.
        ("lenet5", {"optimizer": "Adam"}, ("digits", "Adam", None, None, "constant")),
        ("gpt", {"optimizer": "SGD"}, ("text", "SGD", 0.05, 0.9, "constant")),
        ("gpt", {"optimizer": "AdamW"}, ("text", "AdamW", 1e-3, None, "constant")),
        *(
            ("lenet5", {"strategy": name, "learning_rate": 0.2}, ("digits", "sgd", 0.2, 0.9))
            for name in ("auto", "hogbatch", "host")
        ),
        ("lenet5", {"optimizer": "a:b", "learning_rate": 1}, ("digits", "a:b", 1, None)),
        ("mine:recipe", {}, (None, None, None, None, None)),  # it may have its own
    ],
)
def test_what_nobody_names_suits_the_model(model: str, given: dict, expected: tuple):
    settings = validated_settings({"model": model} | given)
    names = ("data", "optimizer", "learning_rate", "momentum", "schedule")
    found = tuple(getattr(settings, name) for name in names)
    assert found[: len(expected)] == expected
    assert completed(settings) == settings or ":" in model


def test_a_recipe_may_have_its_own_until_nobody_can_name_another():
    like_images = completed(validated_settings({"model": "mine:recipe", "momentum": 0.5}))
    assert (like_images.data, like_images.optimizer) == ("digits", "sgd")
    assert (like_images.learning_rate, like_images.momentum) == (0.05, 0.5)


@pytest.mark.parametrize("model", ["lenet5", "alexnet", "gpt", "gpt2", "bert-base", "vit"])
def test_the_help_has_the_rate_that_suits_a_model(model: str):
    text = TrainSettings.model_fields["learning_rate"].description or ""
    assert re.search(rf"(?<!\d){usual_for(model).learning_rate:.4f}".rstrip("0") + r"0*\b", text)


@pytest.mark.parametrize("name", sorted({form.partition(":")[0] for form in FORMS}))
def test_the_help_of_data_names_all_that_there_are(name: str):
    text = TrainSettings.model_fields["data"].description or ""
    assert re.search(rf"(?<![\w-]){name}\b(?!-)", text)


def test_a_strategy_may_refuse_a_setting_and_auto_refuses_it_too(monkeypatch):
    refusing = replace(allreduce.STRATEGY, name="toy", refused_settings={"accumulate": "no parts"})
    monkeypatch.setitem(STRATEGIES, "toy", refusing)
    toy = LENET5 | {"strategy": "toy"}
    with refused("accumulate"):
        validated_settings(toy | {"accumulate": 2})
    # The default is what it does anyway: a file with all settings names it, too.
    assert validated_settings(toy | {"accumulate": 1}).accumulate == 1
    assert validated_settings(LENET5 | {"strategy": "auto", "accumulate": 2}).accumulate == 2
    monkeypatch.setitem(EXCHANGES, "toy", refusing)
    with refused("accumulate"):
        validated_settings(LENET5 | {"strategy": "auto", "accumulate": 2})


def test_strategies_are_known_by_name_and_refuse_only_what_is_a_setting():
    for name, strategy in STRATEGIES.items():
        assert strategy.name == name
        assert strategy.refused_settings.keys() <= TrainSettings.model_fields.keys()
    for name, strategy in EXCHANGES.items():
        assert find_exchange(name) is strategy
    for name in ("wheel", "magic", "refusals:refused", "refusals:none", "no.module:x"):
        with refused("strategy"):
            find_exchange(name)


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("1", Interval(1, None)),
        ("0.05s", Interval(None, 0.05)),
        ("5min", Interval(None, 300)),
        ("2 h", Interval(None, 7200)),
        ("never", None),
        (None, Interval(seconds=300)),
    ],
)
def test_an_interval_is_steps_or_seconds(text: str | None, interval: Interval | None):
    settings = validated_settings(LENET5 | {"checkpoint_every": text})
    assert settings.checkpoint_interval == interval


@pytest.mark.parametrize("both", [(None, None), (1, 1.0), (0, None), (None, 1e10), (None, 0.0)])
def test_an_interval_is_one_of_both(both: tuple):
    with pytest.raises(ValueError, match="interval"):
        Interval(*both)


def test_settings_cannot_be_changed_and_survive_the_way_to_a_worker():
    settings = validated_settings(LENET5 | {"options": {"bucket_mb": 5}, "seed": 2**62})
    for field in TrainSettings.model_fields:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(settings, field, getattr(settings, field))
    assert TrainSettings.model_validate_json(settings.model_dump_json()) == settings
