"""Import user functions and classes named package.module:factory."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from paceline.core.errors import InvalidInput, first_line
from paceline.core.names import did_you_mean
from paceline.training.models.factory import import_from_here

FORM = "package.module:factory"


def factory_of(setting: str, name: str) -> Callable[..., Any]:
    """Import a factory, also from the current directory.

    Raises InvalidInput with the setting's name if it cannot be imported or called.
    """
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        raise InvalidInput(setting, f"{name!r} is not of the form {FORM}")
    try:
        imported = import_from_here(module)
    except (Exception, SystemExit) as error:
        why = first_line(error)
        raise InvalidInput(setting, f"{name!r} cannot be imported: {why}") from error
    try:
        factory = attrgetter(attribute)(imported)
    except AttributeError as error:
        raise InvalidInput(
            setting,
            f"{name!r}: the module has no {attribute!r}{did_you_mean(attribute, dir(imported))}",
        ) from error
    if not callable(factory):
        raise InvalidInput(setting, f"{name!r} is nothing that can be called")
    found: Callable[..., Any] = factory
    return found
