"""Errors for unknown names, with the most similar known name."""

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches

from paceline.core.errors import InvalidInput, printable

_MOST_LISTED, _LONGEST = 12, 200  # maximum names in an error, maximum characters of a name


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "did you mean 'NAME'?" with the most similar name; "" if no name is similar."""
    names = list(known)
    close = get_close_matches(name.lower(), {one.lower() for one in names}, n=1)
    if not close:
        return ""
    alike = (one for one in names if one.lower() == close[0])  # names that differ only in case
    nearest = max(alike, key=lambda one: SequenceMatcher(None, name, one).ratio())
    return f"did you mean {nearest!r}?"


def not_known(what: str, name: str, known: Iterable[str], also: str = "") -> InvalidInput:
    """Return the error for an unknown name, which suggests the most similar known name.

    `what`: what the name stands for, such as "codec". `also`: text about other allowed values.
    """
    names = list(known)
    listed = ", ".join(names[:_MOST_LISTED]) + (", ..." if len(names) > _MOST_LISTED else "")
    problem = f"must be one of {listed or 'none'}{also}"
    shown = printable(name, _LONGEST)
    return InvalidInput(what, problem, got=shown, hint=did_you_mean(name, names))
