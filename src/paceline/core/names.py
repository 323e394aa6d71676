"""Names that are not known, and the nearest of those that are."""

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches

from paceline.core.errors import InvalidInput, shown


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question that names the closest of the known names; a full stop if none is."""
    names = list(known)
    close = get_close_matches(name.lower(), {one.lower() for one in names}, n=1)
    if not close:
        return "."
    alike = (one for one in names if one.lower() == close[0])  # but for capitals
    nearest = max(alike, key=lambda one: SequenceMatcher(None, name, one).ratio())
    return f"; did you mean {nearest!r}?"


def not_known(what: str, name: str, known: Iterable[str], also: str = "") -> InvalidInput:
    """Return the error for a name that is none of the known ones, with the nearest of them.

    `what` is the field or the kind of thing that has the name; `also` what else may stand there.
    """
    names = list(known)
    question = did_you_mean(name, names)
    choose = "; choose" if question == "." else f"{question} Choose"
    among = ", ".join(names) or "none"
    return InvalidInput(what, f"{shown(name)} is not known{choose} one of {among}{also}")
