"""Write docs/reference.md from settings and the command line: python docs/build/reference.py."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from paceline.commands.app import COMMANDS, loaded
from paceline.core.error_lines import flag_of
from paceline.core.settings import RehearseSettings, TrainSettings
from paceline.records.profile import ProfileSettings
from paceline.records.scale import ScaleSettings
from paceline.records.settings import PlanSettings

PAGE = Path(__file__).parents[1] / "reference.md"
_VERBS: dict[str, type[BaseModel]] = {
    "train": TrainSettings,
    "rehearse": RehearseSettings,
    "plan": PlanSettings,
    "profile": ProfileSettings,
    "scale": ScaleSettings,
}
_AS_TRAIN = {
    "hub": "It takes most options of [train](#train), and its other settings by `--config`.",
}
_OF_ALL = ("--config", "--json")
_DEFAULT = re.compile(r"\s+\[default: (.*)\]$")


class Option(NamedTuple):
    """A row of a table; `default` is Markdown."""

    name: str
    default: str
    text: str

    @property
    def row(self) -> str:
        """The row."""
        text = self.text.replace("|", r"\|")
        return f"| `{self.name}` | {self.default} | {text} |"


def page() -> str:
    """Return the page: a table of options for each command."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Reference"
    yield ""
    yield "The options of each command, made by `python docs/build/reference.py`."
    yield "Most of `train`, `rehearse`, `plan`, `profile` and `scale` are fields of a record: also"
    yield "keys of `run.toml` and arguments in Python."
    yield "A name without `--` is a key and an argument only."
    yield "The options of [hub](#hub) except `--parent` are keys and arguments of `train`, too."
    yield "Commands with such fields take `--config RUN.TOML`, a file of them that options replace."
    yield "`--json` prints one JSON object, `--debug` the traceback of an error."
    yield "The shell [completes](how-to/which-command.md#completion) commands and options."
    for name in (*_VERBS, *(one for one in COMMANDS if one not in _VERBS)):
        yield f"\n## {name}\n"
        yield f"{COMMANDS[name].help}"
        if name in _AS_TRAIN:
            yield _AS_TRAIN[name]
        rows = [one.row for one in _options(name)]
        if rows:
            yield "\n| option | default | what it is |\n|---|---|---|"
            yield from rows


def _options(name: str) -> Iterable[Option]:
    """Return the options of a command: fields of its record, and those of the command line."""
    settings = _VERBS.get(name)
    fields = [] if settings is None else list(_of_record(settings, name))
    known = {one.name.split()[0] for one in fields}
    known |= set(map(_flag, loaded("train").params)) if name in _AS_TRAIN else set()
    own = [one for one in loaded(name).params if _flag(one) not in (*_OF_ALL, *known)]
    return [*fields, *map(_of_command, own)]


def _of_record(settings: type[BaseModel], command: str) -> Iterator[Option]:
    flags = set(map(_flag, loaded(command).params))
    of_hub = set(map(_flag, loaded("hub").params)) - flags
    for name, field in settings.model_fields.items():
        flag = "MODEL" if name == "model" else flag_of(name)
        if name == "kind" or flag in of_hub:
            continue
        yield Option(flag if flag in flags else name, _default(field), field.description or "")


def _default(field: FieldInfo) -> str:
    value = None if field.is_required() else field.default
    if value is None or value in ((), {}):
        return ""
    if isinstance(value, bool):
        return "on" if value else ""
    return f"`{','.join(map(str, value)) if isinstance(value, tuple) else value}`"


def _flag(parameter: Any) -> str:
    """Return how a parameter of a command is written: --strategy, or MODEL."""
    is_option = parameter.param_type_name == "option"
    return str(parameter.opts[0] if is_option else parameter.name.upper())


def _of_command(parameter: Any) -> Option:
    """Return a parameter of a command, whose help text may end with its default."""
    text = (parameter.help or "").replace("\\[", "[")
    default = _DEFAULT.search(text)
    shown = f"`{default[1]}`" if default else ""
    if isinstance(parameter.default, int | float) and not isinstance(parameter.default, bool):
        shown = f"`{parameter.default}`"
    metavar = "" if parameter.metavar is None else f" {parameter.metavar}"
    return Option(f"{_flag(parameter)}{metavar}", shown, _DEFAULT.sub("", text))


if __name__ == "__main__":
    PAGE.write_text(page())
