"""Settings in run.toml: what is written is read again, and options replace what is read."""

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from paceline.commands.options import with_options
from paceline.core.errors import InvalidInput
from paceline.core.settings import RehearseSettings, TrainSettings
from paceline.records.config_file import (
    FILE_NAME,
    merged,
    read_config,
    to_toml,
    with_resumed,
    write_config,
)
from paceline.records.profile import ProfileSettings, validated_profile
from paceline.records.scale import ScaleSettings
from paceline.records.settings import (
    PlanSettings,
    validated,
    validated_rehearsal,
    validated_settings,
)
from paceline.runs import launching

# The text "null" stands for None within tables.
WORDS = st.text(max_size=12).filter(lambda text: text != "null")
NUMBERS = st.integers(-(2**62), 2**62) | st.floats(allow_nan=False)
SCALARS = WORDS | NUMBERS | st.booleans() | st.none()
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)
PATHS = WORDS.filter(lambda text: text.strip(".\0") and "\0" not in text)
SECONDS = st.floats(0.001, 1e6)
# Options of each strategy, some of them null where the default is not.
STRATEGY_OPTIONS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "allreduce": st.fixed_dictionaries(
        {}, optional={"bucket_mb": st.integers(1, 99) | st.none(), "codec": st.just("half")}
    ),
    "host": st.fixed_dictionaries({}, optional={"chunk": st.integers(1, 9)}),
    "wheel": st.fixed_dictionaries(
        {},
        optional={"staleness": st.integers(0, 9) | st.none(), "head": WORDS, "lanes": st.just(1)},
    ),
    "hogbatch": st.fixed_dictionaries(
        {},
        optional={
            "cpu_batch": st.just([2, 8]),
            "beta": st.floats(0.1, 1),
            "policy": st.sampled_from(["adaptive", "cpu_gpu"]),
        },
    ),
    "subbatch": st.just({"gradients": None, "updates": "sub-batch"}),
    "auto": st.just({}),
}
TRAIN_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "workers": st.integers(1, 4),
    "batch_size": st.integers(1, 4096),
    "data": WORDS,
    "epochs": st.integers(1, 10**6),
    "steps": st.integers(1, 10**6),
    "optimizer": WORDS,
    "optimizer_options": st.dictionaries(WORDS, VALUES, max_size=3),
    "learning_rate": st.floats(1e-38, 3e38),
    "momentum": st.floats(0, 0.999),
    "schedule": WORDS,
    "warmup_steps": st.integers(0, 10**6),
    "precision": st.sampled_from(["float32", "bfloat16"]),
    "accumulate": st.integers(1, 64),
    "clip_norm": st.floats(1e-38, 3e38),
    "evaluate_every": st.integers(1, 10**9),
    "seed": st.integers(0, 2**63 - 1),
    "checkpoint_every": st.sampled_from(["500", "60s", "0.05s", "5min", "never"]),
    "keep": st.integers(1, 99),
    "resume": PATHS.map(Path),
    "restarts": st.integers(0, 9),
    "tensorboard": PATHS.map(Path),
    "output": PATHS.map(Path),
    "profile_s": SECONDS,
    "deadline_s": SECONDS,
    "wait_s": SECONDS,
    "run": WORDS,
    "port": st.integers(0, 65535),
}
MODELS = WORDS | st.sampled_from(["lenet5", "gpt", "alexnet", "mine:net"])


def written(folder: Path, settings_of_run: Any) -> dict[str, Any]:
    """Return what is read from the file that is written for these settings."""
    write_config(folder, settings_of_run)
    return read_config(folder / FILE_NAME, type(settings_of_run))


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much])
def test_the_file_of_a_training_gives_the_same_settings(tmp_path: Path, data: st.DataObject):
    strategy = data.draw(st.sampled_from(sorted(STRATEGY_OPTIONS)))
    fields = data.draw(st.fixed_dictionaries({}, optional=TRAIN_FIELDS))
    for name in data.draw(st.sampled_from([("epochs",), ("steps",)])):
        fields.pop(name, None)
    asked = {"model": data.draw(MODELS), "strategy": strategy} | fields
    asked["options"] = data.draw(STRATEGY_OPTIONS[strategy])
    try:
        wanted = validated_settings(asked)
    except InvalidInput:
        assume(False)
    again = validated_settings(written(tmp_path, wanted))
    if wanted.steps is not None:  # which are instead of the epochs
        again = again.model_copy(update={"epochs": wanted.epochs})
    assert again == wanted.model_copy(update={"resume": None})  # the folder is the file's own


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, 2**64])
@pytest.mark.parametrize("field", ["eps", "betas"])
def test_a_number_that_no_file_can_have_is_refused(field: str, number: float):
    options = {"eps": number} if field == "eps" else {"betas": [0.9, number]}
    with pytest.raises(
        InvalidInput, match=f"^optimizer_options: {field}.*{number} (is not|does not)"
    ):
        validated_settings({"model": "gpt", "optimizer": "adamw", "optimizer_options": options})


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


def test_numbers_that_are_none_are_toml_too():
    found = tomllib.loads(to_toml({"a": math.inf, "b": -math.inf, "c": math.nan}))
    assert (found["a"], found["b"]) == (math.inf, -math.inf)
    assert math.isnan(found["c"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "optimiser = 'sgd'",
            r"mine.toml: 'optimiser' is no setting; did you mean 'optimizer'\? K",
        ),
        ("kind = 'train'", r"mine.toml: 'kind' is no setting; did you mean 'bind'\? Known are "),
        ("epochs = 0", "mine.toml: epochs: Input should be greater than or equal to 1, not 0"),
        ("epochs = 'many'", "mine.toml: epochs: Input should be a valid integer.*, not 'many'"),
        ("checkpoint_every = '5m'", "mine.toml: checkpoint_every: '5m' is neither a number of"),
        ("options = 3", "mine.toml: options: Input should be a valid dictionary, not 3"),
        ("epochs = ", "mine.toml: not TOML: Invalid value"),
        ("epochs = 1\nepochs = 2", "mine.toml: not TOML: "),
        (b"\xff\xfe", "mine.toml: not TOML: "),
    ],
)
def test_a_wrong_file_is_named_with_the_key(tmp_path: Path, text: str | bytes, message: str):
    path = tmp_path / "mine.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InvalidInput, match=message) as error:
        read_config(path, TrainSettings)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(InvalidInput, match=r"none\.toml: cannot be read: No such file"):
        read_config(tmp_path / "none.toml", TrainSettings)


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


@pytest.mark.parametrize(
    "kind", [TrainSettings, RehearseSettings, PlanSettings, ScaleSettings, ProfileSettings]
)
def test_every_command_takes_a_file_and_options_win(kind: type, tmp_path: Path):
    found: list[dict[str, Any]] = []
    command = with_options(kind)(lambda values: found.append(values))
    (tmp_path / "mine.toml").write_text('model = "lenet5"\nsteps = 7\ndevice = "p100"\n')
    known = {name for name in ("model", "steps", "device") if name in kind.model_fields}
    lines = (tmp_path / "mine.toml").read_text().splitlines()
    text = "\n".join(line for line in lines if line.split()[0] in known)
    (tmp_path / "mine.toml").write_text(text)
    nothing = dict.fromkeys({*kind.model_fields} - {"kind"})
    command(config=tmp_path / "mine.toml", **nothing)
    expected = {"model": "lenet5", "steps": 7, "device": "p100"}
    assert found.pop() == {name: expected[name] for name in known}
    command(config=tmp_path / "mine.toml", **{**nothing, "model": "mlp"})
    assert found.pop()["model"] == "mlp"


def test_the_command_line_trains_what_a_file_says_unless_options_do(line, monkeypatch):
    requests = []
    monkeypatch.setattr(launching, "carry_out", requests.append)
    Path("mine.toml").write_text(
        'model = "lenet5"\nstrategy = "host"\nsteps = 30\noptimizer = "adamw"\n'
        "[options]\nchunk = 2\n[optimizer_options]\nweight_decay = 0.25\n"
    )
    line("train", "--config", "mine.toml")
    assert line.code == 0, line.err
    asked = requests.pop().settings
    assert (asked.model, asked.strategy, asked.steps) == ("lenet5", "host", 30)
    assert (asked.options, asked.optimizer_options) == ({"chunk": 2}, {"weight_decay": 0.25})
    line(
        *("train", "alexnet", "--config", "mine.toml", "--epochs", 4),
        *("--optimizer-set", "amsgrad=true", "--optimizer-set", "betas=[0.8,0.9]"),
    )
    assert line.code == 0, line.err
    asked = requests.pop().settings
    assert (asked.model, asked.epochs, asked.steps) == ("alexnet", 4, None)
    options = {"weight_decay": 0.25, "amsgrad": True, "betas": [0.8, 0.9]}
    assert asked.optimizer_options == options


def test_a_run_that_is_resumed_says_what_it_was(line, monkeypatch, tmp_path: Path):
    requests = []
    monkeypatch.setattr(launching, "carry_out", requests.append)
    before = validated_settings(
        {"model": "alexnet", "strategy": "wheel", "epochs": 7, "options": {"staleness": None}}
    )
    folder = tmp_path / "runs" / "before"
    folder.mkdir(parents=True)
    write_config(folder, before)
    line("train", "--resume", "runs/before", "--workers", 1)
    assert line.code == 0, line.err
    here = {"resume": folder, "output": folder.parent}
    changed = here | {"workers": 1}
    assert requests.pop().settings == before.model_copy(update=changed)
    (tmp_path / "mine.toml").write_text('epochs = 9\nseed = 5\nresume = "runs/before"\n')
    line("train", "--config", "mine.toml", "--seed", 6)
    assert line.code == 0, line.err
    changed = here | {"epochs": 9, "seed": 6}
    assert requests.pop().settings == before.model_copy(update=changed)


def test_what_resumes_nothing_is_left_as_it_is():
    assert with_resumed({"model": "lenet5"}, TrainSettings) == {"model": "lenet5"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "Missing argument 'model'. (see paceline --help)"),
        (["train", "--config", "empty.toml"], "Missing argument 'model'."),
        (["train", "--config", "none.toml"], "none.toml: cannot be read: No such file"),
        (
            ["train", "--config", "wrong.toml"],
            "wrong.toml: 'epoch' is no setting; did you mean",
        ),
        (["plan", "--config", "train.toml"], "train.toml: 'epochs' is no setting. Known are"),
        (["train", "--config", "both.toml"], "steps: are instead of epochs, and both are given"),
        (["train", "--resume", "empty.toml"], "resume: empty.toml is not the folder of a run"),
        (["train", "--resume", "old"], "old/run.toml: 'snapshots' is no setting"),
        (["train", "lenet5", "--optimizer-set", "eps"], "--optimizer-set: 'eps' is not FIELD=VALU"),
        (
            ["train", "lenet5", "--optimizer", "adamw", "--optimizer-set", "ep=1"],
            "optimizer_options: 'ep' is no field of adamw; did you mean 'eps'?",
        ),
        (["train", "gpt", "--schedule", "cosin"], "schedule: 'cosin' is not known; did you mean"),
        (["hub", "--config", "host.toml"], "strategy: a hub is one of wheel, local, not host"),
        (["hub", "--config", "empty.toml"], "model: name what to train, or a folder by --gen"),
    ],
)
def test_what_cannot_be_done_is_one_line(line, tmp_path: Path, arguments: list, message: str):
    (tmp_path / "empty.toml").write_text("")
    (tmp_path / "wrong.toml").write_text('model = "lenet5"\nepoch = 3\n')
    (tmp_path / "train.toml").write_text('model = "lenet5"\nepochs = 3\n')
    (tmp_path / "both.toml").write_text('model = "lenet5"\nepochs = 3\nsteps = 3\n')
    (tmp_path / "host.toml").write_text(
        'model = "lenet5"\nstrategy = "host"\nbind = "tcp://127.0.0.1:0"\n'
    )
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "run.toml").write_text('model = "lenet5"\nsnapshots = "kept"\n')
    line(*arguments)
    assert (line.code, line.out) == (2, ""), line.err
    assert line.err.count("\n") == 1
    assert line.err.startswith(f"paceline: {message}")
