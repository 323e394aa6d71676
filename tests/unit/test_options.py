"""Options that commands get from settings, and arguments of functions that mirror the fields."""

import inspect
from pathlib import Path
from typing import Annotated, Any, NoReturn

import pytest
import typer
from pydantic import BaseModel, BeforeValidator, Field
from typer.testing import CliRunner

import paceline
from paceline.api import running
from paceline.commands.options import Json, with_options
from paceline.core.errors import InvalidInput
from paceline.core.facts import Bytes
from paceline.core.settings import (
    RehearseSettings,
    RunSettings,
    Shape,
    TrainSettings,
    read_list,
    read_shape,
)
from paceline.records.config_file import to_toml
from paceline.records.profile import ProfileSettings
from paceline.records.scale import ScaleSettings
from paceline.records.settings import PlanSettings
from refusals import refused

WIDE = {"COLUMNS": "4000", "TERM": "dumb"}  # of a terminal that breaks no line
KINDS = (TrainSettings, RehearseSettings, PlanSettings, ScaleSettings, ProfileSettings)


class Wanted(BaseModel):
    """Settings with a field of each type that settings have."""

    kind: str = "wanted"
    model: str = Field(description="A name.")
    options: dict[str, Any] = Field({}, description="Fields of something else.")
    workers: int | str = Field(2, description="A number or a list.")
    shape: Annotated[Shape | None, BeforeValidator(read_shape)] = Field(
        None, description="As 3x8x8."
    )
    counts: Annotated[tuple[int, ...], BeforeValidator(read_list)] = Field(
        (1, 2), description="As 1,2,4."
    )
    memory: Bytes | None = Field(None, description="As 8GiB.")
    force: bool = Field(False, description="Go on.")
    folder: Path = Field(Path("runs"), description="Where.")


def command(kind: type[BaseModel], **how: Any) -> tuple[typer.Typer, list[dict[str, Any]]]:
    """Return an application of one command, and the values with which it has been called."""
    found: list[dict[str, Any]] = []
    app = typer.Typer(rich_markup_mode=None)

    @app.command()
    @with_options(kind, **how)
    def wanted(values: dict[str, Any], *, as_json: Json = False) -> None:
        found.append(values | {"as_json": as_json})

    return app, found


def called(*arguments: str) -> dict[str, Any]:
    """Return the values with which the command of `Wanted` is called."""
    app, found = command(Wanted)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return found[0]


@pytest.mark.parametrize("kind", [Wanted, *KINDS])
def test_every_field_has_an_option_with_its_description(kind: type[BaseModel]) -> None:
    app, _ = command(kind)
    text = CliRunner().invoke(app, ["--help"], env=WIDE).output
    plain = "".join(text.split())  # lines break after hyphens, too
    for name, field in kind.model_fields.items():
        if name not in ("kind", "model", "options", "optimizer_options"):
            assert f"--{name.replace('_', '-')}" in text
            assert field.description
            assert "".join(field.description.split()) in plain
    for table, flag in (("options", "--set"), ("optimizer_options", "--optimizer-set")):
        assert (f"{flag} FIELD=VALUE" in text) == (table in kind.model_fields)
    assert "--config RUN.TOML" in text
    assert "--kind" not in text


def test_fields_that_are_left_out_have_no_option() -> None:
    app, found = command(Wanted, leave_out=("force",), required=False)
    assert "--force" not in CliRunner().invoke(app, ["--help"], env=WIDE).output
    assert CliRunner().invoke(app, []).exit_code == 0
    assert found == [{"as_json": False}]


def test_values_arrive_as_settings_read_them() -> None:
    assert called("net") == {"model": "net", "as_json": False}  # and nothing that is not given
    values = called(
        *("net", "--shape", "3x8x8", "--counts", "1,2,4", "--memory", "8GiB", "--workers", "cpu:1"),
        *("--force", "--folder", "here", "--set", "chunk=2", "--set", "name=a", "--json"),
    )
    assert values.pop("as_json") is True
    read = Wanted.model_validate(values)
    assert (read.shape, read.counts, read.memory) == ((3, 8, 8), (1, 2, 4), 8 * 2**30)
    assert (read.workers, read.force, read.folder) == ("cpu:1", True, Path("here"))
    assert read.options == {"chunk": 2, "name": "a"}


def test_an_argument_is_passed_on_though_it_is_the_default_of_settings(monkeypatch) -> None:
    """Of strategy wheel, whose own default is another: only what was not given may be left out."""
    asked: list[dict[str, Any]] = []

    def requested(verb: str, values: dict[str, Any], **how: bool) -> NoReturn:
        asked.append(values)
        raise InvalidInput("enough", "is enough")

    monkeypatch.setattr(running, "requested", requested)
    for given in ({}, {"momentum": 0.9, "profile_s": 4.0, "options": {"lanes": 1}}):
        with refused("enough"):
            paceline.train("lenet5", strategy="wheel", **given)
        assert asked.pop() == {"model": "lenet5", "strategy": "wheel"} | given


@pytest.mark.parametrize("kind", KINDS)
def test_every_command_takes_a_file_and_options_win(kind: type[BaseModel], tmp_path: Path) -> None:
    app, found = command(kind)
    values = {"model": "lenet5", "steps": 7, "device": "p100"}
    known = {name: value for name, value in values.items() if name in kind.model_fields}
    path = tmp_path / "mine.toml"
    path.write_text(to_toml(known))
    for arguments, expected in (((), known), (("mlp",), known | {"model": "mlp"})):
        assert CliRunner().invoke(app, [*arguments, "--config", str(path)]).exit_code == 0
        assert found.pop() == expected | {"as_json": False}


# What other strategies have otherwise, or other settings replace: None stands for "as it suits".
SUITED = {"profile_s", "epochs"}


@pytest.mark.parametrize(
    ("function", "kind"), [(paceline.train, TrainSettings), (paceline.rehearse, RehearseSettings)]
)
def test_functions_have_the_fields_and_defaults_of_settings(function, kind: type[RunSettings]):
    parameters = dict(inspect.signature(function).parameters)
    fields = {name: field for name, field in kind.model_fields.items() if name != "kind"}
    assert parameters.keys() == fields.keys()
    for name, field in fields.items():
        default = parameters[name].default
        if field.is_required():
            assert default is inspect.Parameter.empty
        elif name in SUITED or field.default == {}:
            assert default is None
        else:
            plain = str(field.default) if isinstance(field.default, Path) else field.default
            assert default == plain
