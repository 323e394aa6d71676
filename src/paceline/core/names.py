"""Names that are not known, and the nearest of those that are."""

from collections.abc import Iterable
from difflib import get_close_matches

from paceline.core.errors import InvalidInput, shown


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question that names the closest of the known names; a full stop if none is."""
    by_folded = {one.lower(): one for one in known}
    close = get_close_matches(name.lower(), by_folded, n=1)
    return f"; did you mean {by_folded[close[0]]!r}?" if close else "."


def not_known(what: str, name: str, known: Iterable[str], also: str = "") -> InvalidInput:
    """Return the error for a name that is none of the known ones, with the nearest of them.

    `what` is the field or the kind of thing that has the name; `also` what else may stand there.
    """
    names = list(known)
    question = did_you_mean(name, names)
    choose = "; choose" if question == "." else f"{question} Choose"
    among = ", ".join(names) or "none"
    return InvalidInput(f"{what}: {shown(name)} is not known{choose} one of {among}{also}")
