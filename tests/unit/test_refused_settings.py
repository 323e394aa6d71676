"""The values that settings refuse: a row for each, with the field that the error names."""

from functools import partial

import pytest

from paceline.records.profile import validated_profile
from paceline.records.scale import ScaleSettings
from paceline.records.settings import (
    PlanSettings,
    validated,
    validated_rehearsal,
    validated_settings,
)
from paceline.rpc.connecting import WorkerProcessSettings
from paceline.strategies.wheel.remote import ChildSettings
from paceline.studies.launch.job import JobSettings
from paceline.studies.probe.probe_ranks import ProbeSettings
from refusals import refused

INF, NAN = float("inf"), float("nan")
# How settings are validated, and values that suffice.
KINDS = {
    "train": (validated_settings, {"model": "lenet5"}),
    "rehearse": (validated_rehearsal, {"model": "lenet5", "device": "p100"}),
    "plan": (partial(validated, PlanSettings), {"model": "lenet5"}),
    "profile": (validated_profile, {"model": "lenet5"}),
    "scale": (partial(validated, ScaleSettings), {"model": "lenet5"}),
    "probe": (partial(validated, ProbeSettings), {"seconds": 1, "workers": 1, "output": "a.toml"}),
    "job": (partial(validated, JobSettings), {}),
    "worker": (partial(validated, WorkerProcessSettings), {"connect": "tcp://10.0.0.1:5555"}),
    "child": (partial(validated, ChildSettings), {"connect": "tcp://10.0.0.1:5555"}),
}
REFUSED = {
    "train": {
        "model": (3, None),
        "strategy": ("magic", "hots"),
        "workers": (0, 1.5, "few", "cpu:1,cpu:1", 10**9, "1" * 10),
        "batch_size": (-1, 0, 1.5),
        "codec": ("dinamic8", "gradients=half", 3),
        "port": (-1, 65536),
        "profile_s": (0, -1, INF),
        "deadline_s": (-1, 0, 1e20, NAN),
        "wait_s": (0, INF),
        "epochs": (0, 1.5, "many"),
        "steps": (0, 2**63),
        "learning_rate": (0, -1, INF, NAN, 1e39),
        "momentum": (1, -0.1, NAN),
        "warmup_steps": (-1,),
        "precision": ("float16",),
        "accumulate": (0, 33),
        "clip_norm": (0, INF, 1e39),
        "evaluate_every": (0,),
        "seed": (-1, 2**63),
        "checkpoint_every": ("0", "0s", "5m", "-1s", True),
        "keep": (0,),
        "restarts": (-1,),
        "options": ({"workers": 3}, [1]),
        "optimizer_options": ([1], {"eps": INF}, {"betas": [0.9, -INF]}, {"eps": 2**64}),
        "force": (True,),
        "balance": ("always",),
        "policy": ("adaptive",),
        "exchange_alone": (True,),
        "keys": ("folder",),
        "bind": ("tcp://10.0.0.1:5555",),
        "speed": (3,),
    },
    "rehearse": {
        "device, stretch": (2,),
        "steps": (2,),
        "forward_ms": (0, NAN, INF),
        "backward_ms": (-1, 1e20),
        "update_ms": (0,),
        "chunk_search": ("best", "runtime"),
        "search_step": (2,),
        "search_range": (2,),
        "interval": (2,),
        "profile_s": (0, -1),
        "strategy": ("hogbatch", "auto"),
        "workers": (0,),
        "momentum": (0.5,),
        "balance": ("auto",),
    },
    "plan": {
        "workers": (0,),
        "batch_size": (0,),
        "precision": ("int8",),
        "profile_s": (0,),
        "input_shape": ("big", "1x1.5"),
        "port": (65536,),
    },
    "profile": {
        "workers": (0,),
        "batch_size": (0,),
        "steps": (3, 100_001),
        "memory": (0, "8 GiB/s", "8 GiB"),
        "attempt_s": (0, INF),
        "strategy": ("wheel", "magic"),
        "options": ({"workers": 2},),
    },
    "scale": {
        "workers": ("one", (), (1,) * 65),
        "batch_size": ("16,few",),
        "scaling.0": ("",),
        "strategy": ("wheel", "host,host"),
        "steps": (4,),
        "classes": (1,),
        "repeats": (0, 1001),
        "samples": (0,),
    },
    "probe": {"workers": (0,), "seconds": (0, NAN, INF)},
    "job": {
        "nodes": (0,),
        "gpu": ("H 100", "H\n"),
        "cpus": (0,),
        "hours": (0, 10_001, NAN),
        "master": ("a b",),
        "master_port": (0, 65536),
    },
    "worker": {
        "connect": (None,),
        "workers": ("", "1,1", "-1", "0;1"),
        "lanes": (0,),
        "deadline_s": (0, NAN),
    },
    "child": {"number": (-1, 2**32), "gather": (0,), "workers": (0, 4097)},
}
ROWS = [
    pytest.param(kind, name, value, id=f"{kind}-{name}-{i}")
    for kind, fields in REFUSED.items()
    for name, values in fields.items()
    for i, value in enumerate(values)
]


def validate(kind: str, fields: dict) -> object:
    function, enough = KINDS[kind]
    return function(enough | fields)


@pytest.mark.parametrize(("kind", "name", "value"), ROWS)
def test_a_value_that_a_setting_cannot_have_is_refused(kind, name, value):
    with refused(name):
        validate(kind, {name.rpartition(", ")[2]: value})


WHEEL, HOGBATCH = {"strategy": "wheel"}, {"strategy": "hogbatch"}
HOST, AUTO, SUBBATCH = {"strategy": "host"}, {"strategy": "auto"}, {"strategy": "subbatch"}
SEARCH = HOST | {"chunk_search": "runtime"}
TWICE = {"codec": "half", "options": {"codec": "dynamic8"}}
# Values that do not go together, or not with a strategy.
TOGETHER = [
    ("train", {"epochs": 5, "steps": 5}, "steps"),
    ("train", {"steps": 5, "warmup_steps": 5}, "warmup_steps"),
    ("train", {"batch_size": 2, "workers": 3}, "batch_size"),
    ("train", {"exchange_alone": True, "workers": 2}, "exchange_alone"),
    ("train", {"strategy": "tree", "codec": "half"}, "codec"),
    *(("train", {"strategy": name} | TWICE, "codec") for name in ("allreduce", "host", "local")),
    ("train", AUTO | {"codec": "half"}, "codec"),
    ("train", AUTO | {"profile_s": 0}, "profile_s"),
    ("train", AUTO | {"options": {"chunk": 1}}, "options"),
    ("train", AUTO | {"workers": "cpu:1"}, "workers"),
    ("train", AUTO | {"policy": "adaptive"}, "policy"),
    ("train", SUBBATCH | {"codec": "all=half"}, "codec"),
    ("train", SUBBATCH | {"codec": 3}, "codec"),
    ("train", SUBBATCH | {"options": {"activations": "onebit"}}, "codec"),
    *(
        ("train", {"options": options}, "strategy allreduce")
        for options in ({"bucket_mb": 0}, {"bucket_mb": 1.5}, {"buckets": 1})
    ),
    ("train", WHEEL | {"workers": 0}, "workers"),
    ("train", WHEEL | {"workers": 65}, "batch_size"),
    ("train", WHEEL | {"policy": "adaptive"}, "policy"),
    ("train", WHEEL | {"port": 7}, "port"),
    ("train", WHEEL | {"balance": "auto"}, "balance"),
    ("train", WHEEL | {"options": {"lanes": 0}}, "strategy wheel"),
    ("train", WHEEL | {"options": {"hub": "a"}}, "options"),
    ("train", WHEEL | {"options": {"staleness": -1}}, "strategy wheel"),
    *(
        ("train", WHEEL | {"codec": codec}, "codec")
        for codec in ("dynamic8", "labels=half", "activation_gradients=zip", "activations=")
    ),
    ("train", WHEEL | {"codec": "activations=half,activations=half"}, "codec"),
    ("train", WHEEL | {"codec": "activations=half", "options": {"activations": "none"}}, "codec"),
    ("train", HOST | {"codec": "activations=half"}, "codec"),
    ("train", HOST | {"workers": "cpu:1"}, "workers"),
    ("train", HOST | {"policy": "adaptive"}, "policy"),
    ("train", HOGBATCH | {"profile_s": 0}, "profile_s"),
    ("train", HOGBATCH | {"workers": "cpu"}, "workers"),
    ("train", HOGBATCH | {"batch_size": 0}, "batch_size"),
    ("train", HOGBATCH | {"port": 7}, "port"),
    ("train", HOGBATCH | {"policy": "fair"}, "strategy hogbatch"),
    ("train", HOGBATCH | {"policy": "hogwild", "options": {"policy": "adaptive"}}, "policy"),
    ("train", HOGBATCH | {"options": {"threads": 2}}, "options"),
    ("train", HOGBATCH | {"options": {"workers": 2}}, "options"),
    ("train", HOGBATCH | {"options": {"staleness_decay": -1}}, "strategy hogbatch"),
    ("train", HOGBATCH | {"options": {"cpu_batch": [9, 4]}}, "strategy hogbatch"),
    ("rehearse", {"device": None}, "device, stretch"),
    ("rehearse", {"device": None, "stretch": 0.5}, "stretch.0"),
    ("rehearse", {"device": None, "stretch": "1,few"}, "stretch.1"),
    ("rehearse", {"device": None, "stretch": "1,2,3"}, "stretch"),
    ("rehearse", {"device": None, "stretch": 2, "update_ms": 1}, "update_ms"),
    ("rehearse", {"device": None, "stretch": 2} | SUBBATCH, "stretch"),
    ("rehearse", {"device": None, "stretch": 2} | WHEEL, "stretch"),
    ("rehearse", {"input_shape": "0x32x32"}, "input_shape.0"),
    ("rehearse", {"workers": 3, "batch_size": 2}, "batch_size"),
    ("rehearse", {"options": {"chunk": 2}}, "strategy allreduce"),
    ("rehearse", SEARCH | {"options": {"chunk": 2}}, "chunk_search"),
    ("rehearse", SEARCH | {"workers": 1}, "chunk_search"),
    ("rehearse", SEARCH | {"chunk_search": "predicted", "search_step": 2}, "search_step"),
    ("rehearse", SEARCH | WHEEL, "chunk_search"),
    ("rehearse", WHEEL | {"port": 7}, "port"),
    ("rehearse", WHEEL | {"keys": "none"}, "keys"),
    ("rehearse", WHEEL | {"codec": "labels=half"}, "codec"),
    ("rehearse", HOST | {"bind": "tcp://a:1"}, "bind"),
    ("rehearse", {"strategy": "tree", "codec": "half"}, "codec"),
    ("plan", {"input_shape": "1x-1x32"}, "input_shape.1"),
    ("profile", {"workers": 3, "batch_size": 2}, "batch_size"),
    ("profile", {"options": {"buckets": 1}}, "strategy allreduce"),
    ("scale", {"machine": "k40-gigabit"}, "machine"),
    ("scale", {"overhead": True, "workers": "2"}, "overhead"),
    ("scale", {"overhead": True, "predict": True}, "overhead"),
    ("scale", {"workers": "1,0"}, "workers.1"),
    ("scale", {"scaling": "weak,feeble"}, "scaling.1"),
]


@pytest.mark.parametrize(("kind", "fields", "field"), TOGETHER)
def test_values_that_do_not_go_together_are_refused(kind, fields, field):
    with refused(field):
        validate(kind, fields)


# The last values that are within the bounds.
ACCEPTED = {
    "train": {"batch_size": 2, "port": 65535, "epochs": 1, "learning_rate": 1e-9, "momentum": 0}
    | {"warmup_steps": 0, "clip_norm": 1e-9, "evaluate_every": 1, "seed": 2**63 - 1, "keep": 1}
    | {"restarts": 0, "accumulate": 32, "steps": 2**63 - 1, "workers": 64},
    "rehearse": {"steps": 3, "workers": 1, "forward_ms": 0.1},
    "plan": {"workers": 1, "batch_size": 1, "port": 0},
    "profile": {"workers": 1, "batch_size": 1, "steps": 4},
    "scale": {"workers": "1", "steps": 5, "classes": 2, "repeats": 1000, "samples": 1},
    "probe": {"workers": 1, "seconds": 3600},
    "job": {"nodes": 1, "cpus": 1, "hours": 10_000, "master_port": 65535, "gpu": "H100.80-GB"},
    "worker": {"workers": "2,0", "lanes": 1},
    "child": {"number": 2**32 - 1, "gather": 1, "workers": 4096},
}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        *((kind, {name: value}) for kind, of in ACCEPTED.items() for name, value in of.items()),
        ("train", {"steps": 5, "warmup_steps": 4}),
        *(("train", {"checkpoint_every": one}) for one in ("5", 500, "1.5h", "never")),
        ("train", HOGBATCH | {"batch_size": 1, "workers": "cpu:1,cpu:1"}),
        ("train", HOGBATCH | {"batch_size": 1, "workers": 3}),
        ("train", WHEEL | {"profile_s": 0}),
        ("rehearse", {"device": None, "stretch": "1,4"}),
    ],
)
def test_values_within_the_bounds_are_taken(kind, fields):
    assert validate(kind, fields)


def test_the_model_has_to_be_given():
    with refused("model"):
        validated_settings({})
