"""The command line: list of commands, help, exit codes, options, and the resulting settings."""

import inspect
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import pytest
from pydantic.fields import FieldInfo

import paceline
from command_line import MACHINE
from paceline.commands.app import COMMANDS, loaded
from paceline.core.error_lines import DEBUG
from paceline.core.errors import InvalidInput, WorkersFailed
from paceline.core.settings import RehearseSettings, RunSettings, TrainSettings
from paceline.records.config_file import write_config
from paceline.records.settings import validated_settings
from paceline.runs import launching, planning, running
from refusals import refused, refused_field

HEAVY = ("torch", "numpy", "pydantic", "paceline.strategies", "paceline.records", "jinja2")
PLAN = ("plan", "lenet5", "--machine", MACHINE)


@pytest.fixture
def requests(monkeypatch) -> list:
    """Record the requests of runs instead of executing them."""
    made = []
    monkeypatch.setattr(launching, "carry_out", made.append)
    return made


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_has_an_example_that_it_reads(line, name):
    command, words = loaded(name), shlex.split(COMMANDS[name].example)
    assert words[0] == name
    context = command.make_context(name, words[1:], resilient_parsing=True)
    given = {key: value for key, value in context.params.items() if value not in (None, ())}
    assert len(given) >= len([word for word in words if word.startswith("--")])
    line(name, "--help")
    assert (line.code, line.err) == (0, "")
    assert f"paceline {COMMANDS[name].example}" in " ".join(line.out.split())
    assert name != "train" or "[default: 64]" in line.out  # rich would parse the brackets as markup


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [([], COMMANDS), (["--version"], [version("paceline")])],
)
def test_without_a_command_all_are_listed(line, arguments, shown):
    line(*arguments)
    assert (line.code, line.err) == (0, "")
    assert set(shown) <= set(line.out.split())


def in_a_process(code: str, *arguments: str, **environment: str) -> tuple[str, list[str]]:
    """Run the command line in a new process; return its output and the last line of errors."""
    before = f"import sys; sys.argv = {['paceline', *arguments]}\n"
    code = f"{before}from paceline.commands.app import run\n{code}"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environment or None
    )
    return done.stdout, done.stderr.splitlines()[-1:]


def test_the_list_of_commands_needs_no_heavy_module():
    code = f"run(); print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    out, said = in_a_process(code, "--help")
    assert said == ["[]"]
    assert set(COMMANDS) <= set(out.split())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("paceline pro", {"probe", "profile"}),
        ("paceline train --strategy ho", {"hogbatch", "host"}),
    ],
)
def test_completion_knows_commands_and_strategies(words, expected):
    last = str(len(words.split(" ")) - 1)
    environment = {"_PACELINE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": last}
    out, _ = in_a_process("run()", **environment)
    assert {name for name in out.split() if not name.startswith("-")} == expected


def test_debug_shows_where_an_error_was_raised(line, monkeypatch):
    monkeypatch.setenv(DEBUG, "1")  # so that monkeypatch unsets it after the test
    monkeypatch.delenv(DEBUG)
    line("plan", "lenet5", "--machine", "none.toml", "--debug")
    assert line.code == 2
    assert "Traceback (most recent call last)" in line.err
    assert refused_field(line.err) == "none.toml"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyError("x"), 1, ["paceline: KeyError: 'x'"]),
        (KeyboardInterrupt(), 130, ["paceline: interrupted"]),
        (WorkersFailed(2), 2, []),  # the workers have printed the error
        (WorkersFailed(3, "gone", is_said=False), 3, ["paceline: gone"]),
    ],
)
def test_each_kind_of_error_has_its_exit_code_and_line(line, monkeypatch, error, code, said):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(planning, "plan", fail)
    line(*PLAN)
    assert (line.code, line.out) == (code, "")
    assert [one.partition(" (this process at ")[0] for one in line.err.splitlines()] == said


def test_settings_of_a_run_are_those_of_the_command_line(line, requests, monkeypatch):
    Path("mine.toml").write_text('optimizer = "adamw"\nsteps = 30\n[options]\nbucket_mb = 5\n')
    options = (
        *("--strategy-option", "gradient_as_bucket_view=false"),
        *("--optimizer-option", "betas=[0.8,0.9]"),
    )
    line("train", "lenet5", "--config", "mine.toml", "--epochs", 2, *options)
    assert line.code == 0, line.err
    (request,) = requests
    expected = {"optimizer": "adamw", "epochs": 2, "steps": None}
    expected |= {"optimizer_options": {"betas": [0.8, 0.9]}}
    expected["options"] = {"bucket_mb": 5, "gradient_as_bucket_view": False}
    assert {name: getattr(request.settings, name) for name in expected} == expected
    line("train", "lenet5", "--balance", "auto", "--keep-all")
    assert requests[1].settings.keep_all
    line("rehearse", "lenet5", "--slowdown", "1,4", "--input-shape", "3x8x9")
    paced = requests[2].settings
    assert (paced.slowdown, paced.input_shape) == ((1, 4), (3, 8, 9))
    monkeypatch.setenv("WORLD_SIZE", "3")  # the number of ranks that torchrun has started
    line("plan", "lenet5", "--json")
    planned = requests[3]
    assert (planned.verb, planned.settings.workers, planned.as_json) == ("plan", 3, True)


def test_a_hub_has_the_options_that_the_page_of_its_strategy_names(line, requests):
    codec = "gradients=dynamic8,activations=half"
    line("hub", "lenet5", "--listen", "tcp://127.0.0.1:0", "--codec", codec, "--momentum", 0.5)
    assert line.code == 0, line.err
    (settings,) = (request.settings for request in requests)
    assert (settings.strategy, settings.momentum) == ("wheel", 0.5)
    assert settings.options == {"gradients": "dynamic8", "activations": "half"}


def test_a_resumed_run_has_its_earlier_settings(line, requests, tmp_path: Path):
    before = validated_settings(
        {"model": "alexnet", "strategy": "wheel", "epochs": 7, "options": {"staleness": None}}
    )
    folder = tmp_path / "runs" / "before"
    folder.mkdir(parents=True)
    write_config(folder, before)
    (tmp_path / "mine.toml").write_text('epochs = 9\nseed = 5\nresume = "runs/before"\n')
    here = {"resume": folder, "output": folder.parent}
    for arguments, changed in (
        (("--resume", "runs/before", "--workers", 1), {"workers": 1}),
        (("--config", "mine.toml", "--seed", 6), {"epochs": 9, "seed": 6}),
    ):
        line("train", *arguments)
        assert line.code == 0, line.err
        assert requests.pop().settings == before.model_copy(update=here | changed)


@pytest.mark.parametrize("code", [0, 2])
def test_a_rank_of_torchrun_ends_at_once(line, monkeypatch, code):
    # At a usual exit, threads of a process group can abort the process.
    def leave(code: int) -> NoReturn:
        raise SystemExit(f"left with {code}")

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(launching, "work", lambda request: code)
    monkeypatch.setattr(launching, "leave", leave)
    with pytest.raises(SystemExit, match=f"left with {code}"):
        line("train", "lenet5")


def test_a_rank_of_torchrun_is_no_coordinator(line, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert line("train", "mlp-64-32-10", "--strategy", "hogbatch").refused == "strategy"


def test_tensorboard_has_to_be_installed(line, monkeypatch):
    # An import fails if the entry in sys.modules is None.
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert line("train", "lenet5", "--tensorboard", "board").refused == "tensorboard"
    assert not Path("board").exists()


def test_a_worker_names_a_hub_that_does_not_answer(line):
    line("worker", "--connect", "tcp://127.0.0.1:1", "--timeout", "0.2", "--device", "cpu")
    assert line.code == 1
    assert "tcp://127.0.0.1:1" in line.err.splitlines()[-1]


def test_the_files_of_generated_keys_are_printed(line):
    names = [Path(path).name for path in line("keys", "keys").out.split()]
    assert names == ["hub.key", "hub.pub", "worker.key", "worker.pub"]


def test_an_argument_is_passed_on_though_it_is_the_default_of_settings(monkeypatch) -> None:
    """Strategy wheel has other defaults, so only omitted arguments may be left out."""
    asked: list[dict[str, Any]] = []

    def requested(verb: str, values: dict[str, Any], **how: bool) -> NoReturn:
        asked.append(values)
        raise InvalidInput("enough", "is enough")

    monkeypatch.setattr(running, "requested", requested)
    for given in ({}, {"momentum": 0.9, "profile_s": 4.0, "options": {"lanes": 1}}):
        with refused("enough"):
            paceline.train("lenet5", strategy="wheel", **given)
        assert asked.pop() == {"model": "lenet5", "strategy": "wheel"} | given


# Settings whose default depends on the strategy or on other settings: functions use None.
SUITED = {"profile_s", "epochs"}


@pytest.mark.parametrize(
    ("function", "kind"), [(paceline.train, TrainSettings), (paceline.rehearse, RehearseSettings)]
)
def test_functions_have_the_fields_and_defaults_of_settings(function, kind: type[RunSettings]):
    def default(name: str, field: FieldInfo) -> object:
        if field.is_required():
            return inspect.Parameter.empty
        if name in SUITED or field.default == {}:
            return None
        return str(field.default) if isinstance(field.default, Path) else field.default

    fields = {name: field for name, field in kind.model_fields.items() if name != "kind"}
    found = {one.name: one.default for one in inspect.signature(function).parameters.values()}
    assert found == {name: default(name, field) for name, field in fields.items()}
