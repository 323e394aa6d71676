"""Import a package's public names when they are used, and objects named package.module:name."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from paceline.core.error_lines import blamed
from paceline.core.errors import InvalidInput
from paceline.core.names import did_you_mean

FORM = "package.module:name"


def imported(setting: str, name: str) -> Any:
    """Import an attribute of a module, which may be in the current directory.

    `name`: in the form package.module:name. Raises InvalidInput, which names `setting`, if there is
    no such module or attribute.
    """
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        raise InvalidInput(setting, f"must have the form {FORM}", got=name)
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{module}.".startswith(f"{missing}."):
            raise InvalidInput(setting, f"cannot import {module!r}: {blamed(error)}") from error
        why = f"cannot import {missing!r}: it is neither installed nor in {here}"
        hint = did_you_mean(missing, [one.stem for one in Path(here).glob("*.py")])
        raise InvalidInput(setting, why, hint=hint) from error
    try:
        return attrgetter(attribute)(found)
    except AttributeError as error:
        public = [key for key in dir(error.obj) if not key.startswith("_")]
        problem = f"cannot find {attribute!r} in module {module!r}"
        hint = did_you_mean(str(error.name), public)
        raise InvalidInput(setting, problem, hint=hint) from error


def lazily(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return a package's `__getattr__`, which imports a module when one of its names is used.

    `modules`: the public names of each module; modules are relative to the package.
    """
    module_of = {name: f".{module}" for module, names in modules.items() for name in names}

    def attribute(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_of[name], package), name)

    return attribute


def factory_of(setting: str, name: str) -> Callable[..., Any]:
    """Import a function or class named package.module:name; InvalidInput for other objects."""
    factory = imported(setting, name)
    if not callable(factory):
        raise InvalidInput(setting, "must be callable", got=name)
    found: Callable[..., Any] = factory
    return found
