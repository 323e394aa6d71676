import re
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from paceline.core.defaults import completed, usual_for
from paceline.core.errors import InvalidInput
from paceline.core.interval import Interval
from paceline.core.settings import TrainSettings
from paceline.records.machine_file import read_machine
from paceline.records.settings import configuration, validated_rehearsal, validated_settings
from paceline.strategies import EXCHANGES, STRATEGIES, allreduce, find_exchange
from paceline.strategies.allreduce.config import AllReduce


def test_what_is_not_said_has_a_value():
    settings = validated_settings({"model": "lenet5"})
    assert (settings.data, settings.strategy, settings.workers) == ("digits", "allreduce", 2)
    assert configuration(settings) == AllReduce(
        workers=2, bucket_mb=None, gradient_as_bucket_view=True
    )
    assert settings.output == Path("runs")


@pytest.mark.parametrize("strategy", ["allreduce", "host", "local"])
def test_the_codec_of_gradients_is_named_by_itself_where_nothing_else_travels(strategy: str):
    given = {"model": "gpt", "strategy": strategy}
    assert configuration(validated_settings(given | {"codec": "dynamic8"})).codec == "dynamic8"
    assert configuration(validated_settings(given | {"codec": "none"})).codec is None
    with pytest.raises(InvalidInput, match="codec: 'half', but options say 'dynamic8'"):
        validated_settings(given | {"codec": "half", "options": {"codec": "dynamic8"}})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"codec": "dinamic8"}, "codec: 'dinamic8' is not known; did you mean 'dynamic8'?"),
        ({"codec": "gradients=half"}, "codec: 'gradients=half' is not known"),
        (
            {"strategy": "tree", "codec": "half"},
            "codec: goes not with strategy tree, only with strategies allreduce, host, wheel, ",
        ),
        ({"strategy": "auto", "codec": "half"}, "codec: goes not with strategy auto, only with"),
        ({"workers": 0}, "workers: Input should be greater than or equal to 1, not 0"),
        ({"epochs": 0}, "epochs: Input should be greater than or equal to 1, not 0"),
        ({"epochs": 1.5}, "epochs: Input should be a valid integer, .*not 1.5"),
        ({"batch_size": -1}, "batch_size: Input should be greater than or equal to 1, not -1"),
        ({"learning_rate": 0}, "learning_rate: Input should be greater than 0, not 0"),
        ({"learning_rate": float("nan")}, "learning_rate: .*, not nan"),
        ({"learning_rate": float("inf")}, "learning_rate: .*, not inf"),
        ({"learning_rate": 1e39}, "learning_rate: .*, not 1e"),  # more than a float32 can hold
        ({"momentum": 1}, "momentum: Input should be less than 1, not 1"),
        ({"momentum": -0.1}, "momentum: Input should be greater than or equal to 0, not -0.1"),
        ({"seed": -1}, "seed: Input should be greater than or equal to 0, not -1"),
        ({"seed": 2**63}, "seed: Input should be less than"),
        ({"profile_s": 0}, "profile_s: Input should be greater than 0, not 0"),
        ({"profile_s": float("inf")}, "profile_s: .*, not inf"),
        ({"deadline_s": -1}, "deadline_s: Input should be greater than 0, not -1"),
        ({"deadline_s": 1e20}, "deadline_s: .*, not 1e"),  # more than a timedelta can hold
        ({"port": 65536}, "port: Input should be less than 65536, not 65536"),
        ({"workers": 1.5}, "workers: Input should be a valid integer, not 1.5"),
        ({"strategy": "subbatch", "codec": 3}, "codec: Input should be a valid string, not 3"),
        ({"strategy": "auto", "profile_s": 0}, "profile_s: Input should be greater than 0"),
        ({"strategy": "hogbatch", "profile_s": 0}, "profile_s: Input should be greater than 0"),
        ({"strategy": "auto", "options": {"chunk": 1}}, "options: with strategy auto nobody"),
        ({"checkpoint_every": "5"}, None),
        ({"checkpoint_every": 500}, None),
        ({"checkpoint_every": "1.5h"}, None),
        ({"checkpoint_every": "0"}, "checkpoint_every: an interval has at least 1 step, not 0"),
        ({"checkpoint_every": "0s"}, "checkpoint_every: an interval is above 0 s"),
        ({"checkpoint_every": "5m"}, "checkpoint_every: '5m' is neither a number of steps"),
        ({"checkpoint_every": True}, "checkpoint_every: Input should be a valid string"),
        ({"steps": 0}, "steps: Input should be greater than or equal to 1, not 0"),
        ({"steps": 5, "epochs": 5}, "steps: are instead of epochs, and both are given"),
        ({"steps": 5, "warmup_steps": 5}, "warmup_steps: 5 of 5 steps; the rate has to reach"),
        ({"steps": 5, "warmup_steps": 4}, None),
        ({"warmup_steps": -1}, "warmup_steps: Input should be greater than or equal to 0"),
        ({"precision": "float16"}, "precision: Input should be 'float32' or 'bfloat16', not 'fl"),
        ({"accumulate": 0}, "accumulate: Input should be greater than or equal to 1, not 0"),
        ({"accumulate": 32}, None),
        (
            {"accumulate": 33},
            "^accumulate: 64 samples cannot be cut into 33 micro-batches of each of 2 workers$",
        ),
        ({"clip_norm": 0}, "clip_norm: Input should be greater than 0, not 0"),
        ({"clip_norm": float("inf")}, "clip_norm: .*, not inf"),
        ({"evaluate_every": 0}, "evaluate_every: Input should be greater than or equal to 1"),
        ({"keep": 0}, "keep: Input should be greater than or equal to 1, not 0"),
        ({"restarts": -1}, "restarts: Input should be greater than or equal to 0, not -1"),
        ({"optimizer_options": [1]}, "optimizer_options: Input should be a valid dictionary"),
        ({"force": True}, "force: goes only with balance"),
        ({"speed": 3}, "speed: Extra inputs are not permitted, not 3"),
        ({"model": 3}, "model: Input should be a valid string, not 3"),
        ({"model": None}, "model: Field required"),
        ({"strategy": "magic"}, "strategy: 'magic' is not known; choose one of allreduce"),
        ({"options": {"bucket_mb": 0}}, "strategy allreduce: bucket_mb: .*, not 0"),
        ({"options": {"bucket_mb": 1.5}}, "strategy allreduce: bucket_mb: .*, not 1.5"),
        ({"options": {"buckets": 1}}, "strategy allreduce: field: 'buckets' is not known"),
        ({"options": {"workers": 3}}, "options: workers is a setting of its own"),
        (
            {"strategy": "subbatch", "options": {"activations": "onebit"}},
            "^codec: 'onebit' is not one for activations .*: it adds its residual to .*; "
            "choose one of dynamic8, .*, bfloat16$",
        ),
        (
            {"batch_size": 2, "workers": 3},
            "^batch_size: 2 samples cannot be shared by 3 workers$",
        ),
    ],
)
def test_a_wrong_field_is_named_in_one_line(fields, message):
    if message is None:  # just within the bounds
        assert validated_settings({"model": "lenet5"} | fields).model == "lenet5"
        return
    with pytest.raises(InvalidInput, match=message) as error:
        validated_settings({"model": "lenet5"} | fields)
    assert "\n" not in str(error.value)


def test_the_model_has_to_be_said():
    with pytest.raises(InvalidInput, match="model: Field required"):
        validated_settings({})


@pytest.mark.parametrize(
    ("model", "rate"), [("lenet5", 0.05), ("alexnet", 0.001), ("networks:alexnet", None)]
)
def test_the_learning_rate_suits_the_model_unless_it_is_said(model: str, rate: float):
    for strategy in ("allreduce", "auto", "hogbatch", "wheel"):
        asked = {"model": model, "strategy": strategy}
        assert validated_settings(asked).learning_rate == rate
        assert validated_settings({**asked, "learning_rate": 0.2}).learning_rate == 0.2


@pytest.mark.parametrize("workers", [{}, {"workers": 3}, {"workers": "cpu:1,cpu:1"}])
def test_workers_that_do_not_share_a_batch_may_have_a_small_one(workers: dict):
    asked = {"model": "lenet5", "strategy": "hogbatch", "batch_size": 1}
    assert validated_settings(asked | workers).batch_size == 1


def test_a_strategy_has_its_own_defaults_unless_values_are_given():
    wheel = {"model": "lenet5", "strategy": "wheel"}
    assert validated_settings(wheel).momentum == 0.8
    assert validated_settings(wheel | {"momentum": 0.9}).momentum == 0.9
    assert validated_settings(wheel | {"profile_s": 0}).profile_s == 0
    paced = wheel | {"device": "p100"}
    assert validated_rehearsal(paced).profile_s == 1
    assert validated_rehearsal(paced | {"profile_s": 2.0}).profile_s == 2
    assert validated_rehearsal(paced | {"strategy": "host"}).profile_s == 2


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
        (
            "lenet5",
            {"optimizer": "a:b", "learning_rate": 1},
            ("digits", "a:b", 1, None, "constant"),
        ),
    ],
)
def test_what_nobody_names_is_what_suits_the_model(model: str, given: dict, expected: tuple):
    settings = validated_settings({"model": model} | given)
    names = ("data", "optimizer", "learning_rate", "momentum", "schedule")
    assert tuple(getattr(settings, name) for name in names) == expected
    assert completed(settings) == settings


@pytest.mark.parametrize(
    "model", ["lenet5", "alexnet", "gpt", "gpt2", "bert", "bert-base", "vit", "mine:net"]
)
def test_the_help_says_the_rate_that_suits_a_model(model: str):
    text = TrainSettings.model_fields["learning_rate"].description or ""
    assert re.search(rf"(?<!\d){usual_for(model).learning_rate:.4f}".rstrip("0") + r"0*\b", text)


def test_a_recipe_may_have_its_own_until_nobody_can_name_another():
    settings = validated_settings({"model": "mine:recipe", "momentum": 0.5})
    assert (settings.data, settings.optimizer, settings.learning_rate) == (None, None, None)
    like_images = completed(settings)
    assert (like_images.data, like_images.optimizer) == ("digits", "sgd")
    assert (like_images.learning_rate, like_images.momentum) == (0.05, 0.5)


REFUSING = replace(
    allreduce.STRATEGY, name="toy", refused_settings={"accumulate": "it has no parts; take less"}
)


def test_a_strategy_refuses_a_setting_with_its_reason(monkeypatch):
    monkeypatch.setitem(STRATEGIES, "toy", REFUSING)
    asked = {"model": "lenet5", "strategy": "toy"}
    with pytest.raises(
        InvalidInput, match=r"^accumulate: goes not with strategy toy: it has no parts; take less$"
    ):
        validated_settings(asked | {"accumulate": 2})
    # The default is what it does anyway: a file with all settings names it, too.
    assert validated_settings(asked | {"accumulate": 1}).accumulate == 1


def test_auto_refuses_what_one_of_its_strategies_refuses(monkeypatch):
    monkeypatch.setitem(EXCHANGES, "toy", REFUSING)
    with pytest.raises(InvalidInput, match="accumulate: goes not with strategy toy: it has no"):
        validated_settings({"model": "lenet5", "strategy": "auto", "accumulate": 2})


def test_refused_settings_of_strategies_are_settings():
    for strategy in STRATEGIES.values():
        assert strategy.refused_settings.keys() <= TrainSettings.model_fields.keys()


@pytest.mark.parametrize(
    ("text", "steps", "seconds"),
    [("1", 1, None), ("0.05s", None, 0.05), ("5min", None, 300), ("2 h", None, 7200)],
)
def test_an_interval_is_steps_or_seconds(text: str, steps: int | None, seconds: float | None):
    assert Interval.parse(text) == Interval(steps, seconds)
    settings = validated_settings({"model": "lenet5", "checkpoint_every": text})
    assert settings.checkpoint_interval == Interval(steps, seconds)


def test_never_is_no_interval_and_an_interval_is_one_of_both():
    asked = {"model": "lenet5", "checkpoint_every": "never"}
    assert validated_settings(asked).checkpoint_interval is None
    assert validated_settings({"model": "lenet5"}).checkpoint_interval == Interval(seconds=300)
    for both in ((None, None), (1, 1.0), (0, None), (None, 1e10)):
        with pytest.raises(ValueError, match="interval"):
            Interval(*both)


def test_options_are_fields_of_the_strategy():
    options = {"bucket_mb": 5, "gradient_as_bucket_view": False}
    settings = validated_settings({"model": "lenet5", "workers": 3, "options": options})
    assert configuration(settings) == AllReduce(3, 5, False)


@pytest.mark.parametrize("field", TrainSettings.model_fields)
def test_settings_cannot_be_changed_and_survive_the_way_to_a_worker(field: str):
    settings = validated_settings({"model": "lenet5", "options": {"bucket_mb": 5}, "seed": 2**62})
    with pytest.raises(ValidationError, match="frozen"):
        setattr(settings, field, getattr(settings, field))
    again = TrainSettings.model_validate_json(settings.model_dump_json())
    assert getattr(again, field) == getattr(settings, field)


def test_every_strategy_is_known_by_its_name():
    for name, strategy in EXCHANGES.items():
        assert find_exchange(name) is strategy
        assert strategy.name == name


MACHINE = """
name = "one"
[[hosts]]
name = "host"
cores = 1
memory_bytes = "1 GiB"
memory_bandwidth_bytes_per_s = "1 GB/s"
source = "made up"
[[devices]]
name = "cpu0"
host = "host"
kind = "cpu"
flops_per_s = "1 Gflop/s"
memory_bytes = "1 GiB"
memory_bandwidth_bytes_per_s = "1 GB/s"
source = "made up"
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("", "", None),
        ("1 Gflop/s", "1 Gflops", "flops_per_s: unknown unit 'Gflops'"),
        ("cores = 1", "cores = -1", "hosts.0.cores: Input should be greater than 0, not -1"),
        ('kind = "cpu"', 'kind = "tpu"', "devices.0.kind: Input should be 'cpu' or 'gpu'"),
        ('kind = "cpu"', "", "devices.0.kind: Field required"),
        ('host = "host"', 'host = "ghost"', "devices.cpu0.host: no host 'ghost'"),
        ("[[hosts]]", "[[hosts]", r"not TOML: .*line 3"),
        ("made up", "\\q", "not TOML: "),
        ('name = "one"', 'name = "one"\nspeed = 3', "speed: Extra inputs"),
    ],
)
def test_a_machine_file_is_read_or_its_fault_named(tmp_path, old, new, message):
    path = tmp_path / "mine.toml"
    path.write_text(MACHINE.replace(old, new) if old else MACHINE)
    if message is None:
        assert read_machine(path).devices[0].flops_per_s == 1e9
        return
    with pytest.raises(InvalidInput, match=rf"mine\.toml: .*{message}") as error:
        read_machine(path)
    assert "\n" not in str(error.value)


def test_a_machine_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InvalidInput, match=r"none\.toml: cannot be read: No such file"):
        read_machine(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match=r"bytes\.toml: not TOML"):
        read_machine(tmp_path / "bytes.toml")
