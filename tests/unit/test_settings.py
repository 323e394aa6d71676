from pathlib import Path

import pytest
from pydantic import ValidationError

from paceline.core.errors import InvalidInput
from paceline.core.settings import TrainSettings
from paceline.records.machine_file import read_machine
from paceline.records.settings import configuration, validated_rehearsal, validated_settings
from paceline.strategies import EXCHANGES, find_exchange
from paceline.strategies.allreduce.config import AllReduce


def test_what_is_not_said_has_a_value():
    settings = validated_settings({"model": "lenet5"})
    assert (settings.data, settings.strategy, settings.workers) == ("digits", "allreduce", 2)
    assert configuration(settings) == AllReduce(
        workers=2, bucket_mb=None, gradient_as_bucket_view=True
    )
    assert settings.output == Path("runs")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
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
        ({"strategy": "wheel", "resume": True}, "resume: goes only with snapshots"),
        ({"force": True}, "force: goes only with balance"),
        ({"speed": 3}, "speed: Extra inputs are not permitted, not 3"),
        ({"model": 3}, "model: Input should be a valid string, not 3"),
        ({"model": None}, "model: Field required"),
        ({"strategy": "magic"}, "strategy: 'magic' is not known; choose one of allreduce"),
        ({"options": {"bucket_mb": 0}}, "strategy allreduce: bucket_mb: .*, not 0"),
        ({"options": {"bucket_mb": 1.5}}, "strategy allreduce: bucket_mb: .*, not 1.5"),
        ({"options": {"buckets": 1}}, "strategy allreduce: buckets: Unexpected keyword"),
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
    with pytest.raises(InvalidInput, match=message) as error:
        validated_settings({"model": "lenet5"} | fields)
    assert "\n" not in str(error.value)


def test_the_model_has_to_be_said():
    with pytest.raises(InvalidInput, match="model: Field required"):
        validated_settings({})


@pytest.mark.parametrize(
    ("model", "rate"), [("lenet5", 0.05), ("alexnet", 0.001), ("networks:alexnet", 0.05)]
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
