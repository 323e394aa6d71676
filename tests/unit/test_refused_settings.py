"""Refused settings and command lines, by the field that the error names."""

import json
from functools import partial
from pathlib import Path

import pytest

from command_line import MACHINE, steps, write_run
from paceline.core.reading import validated
from paceline.record.trace import write_trace
from paceline.records.profile import validated_profile
from paceline.records.scale import ScaleSettings
from paceline.records.settings import PlanSettings, validated_rehearsal, validated_settings
from paceline.rpc.connecting import WorkerProcessSettings
from paceline.strategies.wheel.remote import ChildSettings
from paceline.studies.probe.probe_ranks import ProbeSettings
from profiles import profile_result, write_profile
from refusals import refused

INF, NAN = float("inf"), float("nan")
# The validation of each kind of settings, and its required values.
KINDS = {
    "train": (validated_settings, {"model": "lenet5"}),
    "rehearse": (validated_rehearsal, {"model": "lenet5", "device": "p100"}),
    "plan": (partial(validated, PlanSettings), {"model": "lenet5"}),
    "profile": (validated_profile, {"model": "lenet5"}),
    "scale": (partial(validated, ScaleSettings), {"model": "lenet5"}),
    "probe": (partial(validated, ProbeSettings), {"seconds": 1, "workers": 1, "output": "a.toml"}),
    "worker": (partial(validated, WorkerProcessSettings), {"connect": "tcp://10.0.0.1:5555"}),
    "child": (partial(validated, ChildSettings), {"connect": "tcp://10.0.0.1:5555"}),
}
REFUSED = {
    "train": {"model": (3, None), "batch_size": (-1, 0, 1.5)}
    | {"strategy": ("magic", "hierarchy", "paceline.strategies.hierarchy:STRATEGY")}
    | {"workers": (0, 1.5, "few", "cpu:1,cpu:1", 10**9, "1" * 10), "accumulate": (0, 33)}
    | {"codec": ("dinamic8", "gradients=half", 3), "keep_checkpoints": (0,)}
    | {"profile_s": (0, -1, INF), "deadline_s": (-1, 0, 1e20, NAN), "wait_s": (0, INF)}
    | {"epochs": (0, 1.5, "many"), "steps": (0, 2**63), "seed": (-1, 2**63), "max_restarts": (-1,)}
    | {"learning_rate": (0, -1, INF, NAN, 1e39), "momentum": (1, -0.1, NAN), "warmup_steps": (-1,)}
    | {"precision": ("float16",), "clip_norm": (0, INF, 1e39), "evaluate_every": (0,)}
    | {"checkpoint_every": ("0", "0s", "5m", "-1s", "10000000000s", True)}
    | {"options": ({"workers": 3}, [1])}
    | {"optimizer_options": ([1], {"eps": INF}, {"betas": [0.9, -INF]}, {"eps": 2**64})}
    | {"keep_all": (True,), "balance": ("always",), "keys": ("folder",)}
    | {"exchange_alone": (True,), "listen": ("tcp://10.0.0.1:5555",), "speed": (3,)},
    "rehearse": {"slowdown": (2,), "steps": (2,), "forward_ms": (0, NAN, INF)}
    | {"backward_ms": (-1, 1e20), "update_ms": (0,)}
    | {"profile_s": (0,)}
    | {"strategy": ("hogbatch", "auto"), "momentum": (0.5,), "balance": ("auto",)},
    "plan": {"workers": (0,), "batch_size": (0,), "precision": ("int8",), "profile_s": (0,)}
    | {"input_shape": ("big", "1x1.5")},
    "profile": {"workers": (0,), "batch_size": (0,), "steps": (3, 100_001)}
    | {"largest_batch": (0, "8 apples"), "memory": (0, "8 GiB/s", "8 GiB")}
    | {"strategy": ("wheel", "magic")},
    "scale": {"workers": ("one", (), (1,) * 65), "batch_size": ("16,few",), "scaling": ("",)}
    | {"strategy": ("wheel", "host,host"), "steps": (4,), "classes": (1,), "repeats": (0, 1001)}
    | {"samples": (0,)},
    "probe": {"workers": (0,), "seconds": (0, NAN, INF)},
    "worker": {"connect": (None,), "workers": ("", "1,1", "-1", "0;1")} | {"deadline_s": (0, NAN)},
    "child": {"number": (-1, 2**32), "gather": (0,), "workers": (0, 4097)},
}
ROWS = [
    pytest.param(kind, {name: value}, name, id=f"{kind}-{name}-{i}")
    for kind, fields in REFUSED.items()
    for name, values in fields.items()
    for i, value in enumerate(values)
]


def validate(kind: str, fields: dict) -> object:
    function, enough = KINDS[kind]
    return function(enough | fields)


WHEEL, HOGBATCH = {"strategy": "wheel"}, {"strategy": "hogbatch"}
HOST, AUTO, SUBBATCH = {"strategy": "host"}, {"strategy": "auto"}, {"strategy": "subbatch"}
SEARCH = HOST | {"options": {"chunk": "search"}}
TWICE = {"codec": "half", "options": {"codec": "dynamic8"}}
# Incompatible values, and values that a strategy does not support.
TOGETHER = [
    ("train", {"epochs": 5, "steps": 5}, "steps"),
    ("train", {"steps": 5, "warmup_steps": 5}, "warmup_steps"),
    ("train", {"batch_size": 2, "workers": 3}, "batch_size"),
    ("train", {"exchange_alone": True, "workers": 2}, "exchange_alone"),
    ("train", {"strategy": "tree", "codec": "half"}, "codec"),
    ("train", TWICE, "codec"),
    ("train", AUTO | {"codec": "half"}, "codec"),
    ("train", AUTO | {"profile_s": 0}, "profile_s"),
    ("train", AUTO | {"options": {"chunk": 1}}, "options"),
    ("train", AUTO | {"workers": "cpu:1"}, "workers"),
    ("train", SUBBATCH | {"codec": "all=half"}, "codec"),
    ("train", SUBBATCH | {"balance": "auto"}, "balance"),
    ("train", SUBBATCH | {"accumulate": 2}, "accumulate"),
    ("train", {"options": {"bucket_mb": 1.5}}, "options.bucket_mb"),
    ("train", {"options": {"buckets": 1}}, "options"),
    ("train", WHEEL | {"keys": "folder"}, "keys"),
    ("train", WHEEL | {"options": {"hub": "a"}}, "options.hub"),
    ("train", WHEEL | {"options": {"staleness": -1}}, "options.staleness"),
    *(
        ("train", WHEEL | {"codec": codec}, "codec")
        for codec in ("dynamic8", "labels=half", "activation_gradients=zip", "activations=")
    ),
    ("train", WHEEL | {"codec": "activations=half,activations=half"}, "codec"),
    ("train", WHEEL | {"codec": "activations=half", "options": {"activations": "none"}}, "codec"),
    ("train", HOGBATCH | {"profile_s": 0}, "profile_s"),
    ("train", HOGBATCH | {"workers": "cpu"}, "workers"),
    ("train", HOGBATCH | {"options": {"threads": 2}}, "options.threads"),
    ("rehearse", {"device": None}, "device"),
    ("rehearse", {"device": None, "slowdown": 0.5}, "slowdown"),
    ("rehearse", {"device": None, "slowdown": "1,2,3"}, "slowdown"),
    ("rehearse", {"device": None, "slowdown": 2, "update_ms": 1}, "update_ms"),
    ("rehearse", {"device": None, "slowdown": 2} | SUBBATCH, "slowdown"),
    ("rehearse", SEARCH | WHEEL, "options"),
    ("rehearse", HOST | {"options": {"chunk": "best"}}, "options.chunk"),
    ("rehearse", HOST | {"options": {"chunk": "search", "interval": 0}}, "options.interval"),
    ("plan", {"input_shape": "1x-1x32"}, "input_shape"),
    ("profile", {"workers": 3, "batch_size": 2}, "batch_size"),
    ("scale", {"machine": "k40-gigabit"}, "machine"),
    ("scale", {"overhead": True, "workers": "2"}, "overhead"),
    ("scale", {"overhead": True, "kinds": "predicted"}, "overhead"),
]


@pytest.mark.parametrize(("kind", "fields", "field"), [*ROWS, *TOGETHER])
def test_a_value_that_a_setting_cannot_have_is_refused(kind, fields, field):
    with refused(field):
        validate(kind, fields)


# Extreme values within the bounds.
ACCEPTED = {
    "train": {"batch_size": 2, "epochs": 1, "learning_rate": 1e-9, "momentum": 0, "workers": 64}
    | {"warmup_steps": 0, "clip_norm": 1e-9, "evaluate_every": 1, "seed": 2**63 - 1}
    | {"keep_checkpoints": 1, "max_restarts": 0, "accumulate": 32, "steps": 2**63 - 1},
    "rehearse": {"steps": 3, "workers": 1, "forward_ms": 0.1},
    "plan": {"workers": 1, "batch_size": 1},
    "profile": {"workers": 1, "batch_size": 1, "steps": 4},
    "scale": {"workers": "1", "steps": 5, "classes": 2, "repeats": 1000, "samples": 1},
    "probe": {"workers": 1, "seconds": 3600},
    "worker": {"workers": "2,0"},
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
        ("rehearse", {"device": None, "slowdown": "1,4"}),
    ],
)
def test_values_within_the_bounds_are_accepted(kind, fields):
    assert validate(kind, fields)


# Command lines that are refused before anything is started.
LENET5 = ("plan", "lenet5", "--machine", MACHINE)
TRAIN, PACED = ("train", "lenet5"), ("rehearse", "lenet5", "--device", "k40-gigabit/gpu0")
TRAIN_WHEEL, PACED_WHEEL = (*TRAIN, "--strategy", "wheel"), (*PACED, "--strategy", "wheel")
TRAIN_HOGBATCH = ("train", "mlp-64-32-10", "--strategy", "hogbatch", "--workers", "cpu:1")
MEASURED = ("plan", "lenet5", "--machine", "8xv100", "--strategy", "allreduce")
LOCAL = (*TRAIN, "--strategy", "local", "--strategy-option")
TEN = "synthetic:samples=10"
HUB, WORKER = ("hub", "lenet5"), ("worker", "--connect", "tcp://127.0.0.1:1")
RUN_FIELDS = {"kind": "plan", "model": "net", "machine": "a", "batch_size": 1, "facts": {}}
RANKING = {"plans": [], "refused": []} | dict.fromkeys(("workers_worth", "alone_samples_per_s"))
# The field that the error names, and the command line.
LINES = [
    ("none.toml", "rehearse", "lenet5", "--device", "none.toml:a"),
    ("bad.toml", "plan", "lenet5", "--machine", "bad.toml"),
    ("machine", "plan", "vgg16", "--machine", "k40-gigabit", "--batch-size", "1000000"),
    ("measured", "plan", "lenet5", "--measured", "350/s"),
    ("precision", "plan", "lenet5", "--precision", "float16"),
    ("torch.nn:ReLU", "plan", "torch.nn:ReLU", "--machine", MACHINE),
    ("explain", *LENET5, "--explain", "--sweep", "bandwidth=1M:2M"),
    ("measured", *MEASURED, "--measured", "two"),
    ("input_shape", "plan", "lenet5", "--input-shape", "1x32x32"),
    ("data", *LENET5, "--data", "digits"),
    ("output", *LENET5, "--output", "file/inside"),
    ("output", *LENET5, "--sweep", "bandwidth=1M:2M", "--output", "plans"),
    ("lenet5", *LENET5, "--input-shape", "9x9"),
    ("workers", *TRAIN_WHEEL, "--workers", 60),
    ("workers", *TRAIN_WHEEL, "--data", TEN, "--workers", 12, "--strategy-option", "lanes=12"),
    ("workers", *TRAIN_HOGBATCH, "--workers", "cpu:4000"),
    ("workers", *PACED, "--workers", 9999, "--batch-size", 9999),
    ("workers", *WORKER, "--worker-ids", "a"),
    ("workers", "profile", "lenet5", "--workers", 1000, "--batch-size", 1000),
    # Options of a strategy.
    ("options", *LENET5, "--strategy-option", "codec=half"),
    ("options", *LENET5, "--strategy", "allreduce,host", "--strategy-option", "chunk=1"),
    ("options", *TRAIN, "--strategy-option", "bucket_mb"),
    ("optimizer_options", *TRAIN, "--optimizer-option", "eps"),
    ("optimizer", *TRAIN_HOGBATCH, "--optimizer", "lbfgs"),
    ("optimizer_options", *TRAIN, "--optimizer", "adamw", "--optimizer-option", "ep=1"),
    ("momentum", *TRAIN_HOGBATCH, "--optimizer", "adam", "--momentum", 0.9),
    ("head", *TRAIN_WHEEL, "--strategy-option", "head=none"),
    ("head", *PACED_WHEEL, "--strategy-option", "head=none"),
    ("staleness", *TRAIN_WHEEL, "--strategy-option", "staleness=0"),
    ("staleness_decay", *PACED_WHEEL, "--strategy-option", "staleness_decay=1"),
    ("strategy_option codec", *LENET5, "--strategy=host", "--strategy-option=codec=threshold:1@2"),
    ("codec", *TRAIN_WHEEL, "--codec", "activations=onebit"),
    ("codec", *TRAIN_WHEEL, "--codec", "activation_gradients=auto"),
    ("codec", *TRAIN_WHEEL, "--codec", "gradients=threshold:0.1"),
    ("checkpoint_every", *TRAIN_WHEEL, "--checkpoint-every", 500),
    # Devices and addresses.
    ("device", "rehearse", "lenet5", "--device", f"{MACHINE}:gpu"),
    ("device", *WORKER, "--device", "tpu"),
    ("listen", *HUB, "--listen", "tcp://10.9.9.9:5555"),
    ("listen", *PACED_WHEEL, "--listen", "tcp://0.0.0.0:5555"),
    ("none/hub.key", *HUB, "--listen", "tcp://127.0.0.1:5555", "--keys", "none"),
    ("none/worker.key", *WORKER, "--keys", "none"),
    ("connect", "worker"),
    ("connect", "worker", "--connect", "tcp://10.9.9.9:5555"),
    ("model", "hub"),
    ("strategy", "plan", "lenet5", "--strategy", "host,tree"),
    ("strategy", "hub", "--config", "host.toml"),
    ("elastic", "train", "lenet5", "--elastic"),
    ("worker_ids", *LOCAL, "worker_ids=0"),
    ("worker_ids", *LOCAL, "worker_ids=0,2", "--elastic"),
    ("lighthouse", *LOCAL, "lighthouse=http://h:1"),
    # Files and folders.
    ("train.toml", "plan", "--config", "train.toml"),
    ("resume", "train", "--resume", "empty.toml"),
    ("resume", *TRAIN_WHEEL, "--resume", "old"),
    ("misspelled/run.toml", "train", "--resume", "misspelled"),
    ("none", "compare", "none"),
    ("none", "report", "none"),
    ("inside/result.json", "report", "inside"),
    ("measured", *MEASURED, "--measured", "none"),
    ("plan", "compare", "run", "plan"),
    ("plan", "report", "plan", "--rehearsal", "run"),
    ("two", "compare", "run", "run", "two"),
    ("empty/trace.json", "compare", "empty"),
    ("short", "compare", "short"),
    ("run or short", "compare", "run", "short"),
    ("nameless/result.json", "compare", "run", "nameless"),
    ("damaged/result.json", "report", "damaged"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Write the files and folders of the command lines."""
    folder = tmp_path_factory.mktemp("files")
    for name, text in {
        "file": "",
        "bad.toml": "[[hosts]]",
        "empty.toml": "",
        "train.toml": 'model = "lenet5"\nepochs = 3\n',
        "host.toml": 'model = "lenet5"\nstrategy = "host"\nlisten = "tcp://127.0.0.1:0"\n',
        "misspelled/run.toml": 'model = "lenet5"\nsnapshots = "kept"\n',
        "old/run.toml": "profile_s = 1.0\n",
        "empty/trace.json": '{"traceEvents": []}',
        "plan/result.json": json.dumps(RUN_FIELDS | {"id": "plan", "ranking": RANKING}),
        "damaged/result.json": json.dumps(RUN_FIELDS | {"id": "damaged"}),
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "inside").mkdir()
    write_run(folder / "run", 1, 1)
    write_profile(folder / "two", profile_result())
    for name in ("nameless", "plan", "damaged"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "trace.json").write_text((folder / "run" / "trace.json").read_text())
    (folder / "short").mkdir()
    one = steps(1, "predicted", 1), steps(1, "measured", 1)
    write_trace(folder / "short" / "trace.json", one)
    return folder


@pytest.mark.parametrize(("field", "arguments"), [(field, row) for field, *row in LINES])
def test_a_command_line_is_refused_before_a_run_begins(line, files, monkeypatch, arguments, field):
    monkeypatch.chdir(files)
    assert line(*arguments).refused == field
    assert not list(files.glob("runs/*"))
