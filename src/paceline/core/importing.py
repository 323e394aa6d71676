"""Functions and classes of the user's that settings name, as package.module:name."""

import importlib
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

from paceline.core.error_lines import blamed
from paceline.core.errors import InvalidInput
from paceline.core.names import did_you_mean

FORM = "package.module:name"


def imported(setting: str, name: str) -> Any:
    """Import what `name` says, as `python -m` does: also from the current directory.

    Raises InvalidInput, beginning with the setting, if there is no such module or attribute.
    """
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        raise InvalidInput(setting, f"{name!r} is not of the form {FORM}")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module}.".startswith(f"{missing}."):
            why = f"there is no module {missing!r} in {here} or among the installed packages"
        else:
            why = f"importing {module!r} failed: {blamed(error)}"
        raise InvalidInput(setting, why) from error
    try:
        return attrgetter(attribute)(found)
    except AttributeError as error:
        public = [key for key in dir(error.obj) if not key.startswith("_")]
        hint = did_you_mean(str(error.name), public).rstrip(".")
        raise InvalidInput(
            setting, f"the module {module!r} has no attribute {attribute!r}{hint}"
        ) from error


def factory_of(setting: str, name: str) -> Callable[..., Any]:
    """Import a function or class as `imported` does; InvalidInput if it cannot be called."""
    factory = imported(setting, name)
    if not callable(factory):
        raise InvalidInput(setting, f"{name!r} is nothing that can be called")
    found: Callable[..., Any] = factory
    return found
