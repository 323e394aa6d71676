"""Write docs/reference.md from the records of settings: python docs/build/reference.py."""

from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

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
_TABLES = {"options": "--set FIELD=VALUE", "optimizer_options": "--optimizer-set FIELD=VALUE"}


def page() -> str:
    """Return the page: a table of options for each verb."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Reference"
    yield ""
    yield "The settings of each verb, made from its record by `python docs/build/reference.py`."
    yield "They are options of the command line, keys of `run.toml`, and arguments in Python."
    yield "Options have `-` in place of `_`."
    for verb, settings in _VERBS.items():
        yield f"\n## {verb}\n"
        yield "| option | default | what it is |\n|---|---|---|"
        for name, field in settings.model_fields.items():
            if name != "kind":
                yield _row(name, field)


def _row(name: str, field: FieldInfo) -> str:
    shown = _TABLES.get(name, f"--{name.replace('_', '-')}")
    if name == "model":
        shown = "MODEL"
    text = (field.description or "").replace("|", "\\|")
    return f"| `{shown}` | {_default(field)} | {text} |"


def _default(field: FieldInfo) -> str:
    value = None if field.is_required() else field.default
    if value is None or value in ((), {}):
        return ""
    if isinstance(value, bool):
        return "on" if value else ""
    return f"`{','.join(map(str, value)) if isinstance(value, tuple) else value}`"


if __name__ == "__main__":
    PAGE.write_text(page())
