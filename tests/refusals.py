"""Refusals by their fields, so that no test pins a sentence."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from paceline.core.errors import InvalidInput


@contextmanager
def refused(field: object, **known: Any) -> Iterator[pytest.ExceptionInfo[InvalidInput]]:
    """Expect an InvalidInput of one line about this field; its `got` and `hint` may be given, too.

    with refused("batch_size", got=0): ...
    """
    with pytest.raises(InvalidInput) as caught:
        yield caught
    error = caught.value
    assert error.field == str(field), error
    for name, value in known.items():
        assert getattr(error, name) == value, error
    assert error.problem
    assert "\n" not in str(error)


def refused_field(err: str) -> str:
    """Return the field of the one refusal that a command printed: "paceline: FIELD: problem"."""
    (line,) = {one for one in err.splitlines() if one.startswith("paceline: ")}
    return line.removeprefix("paceline: ").partition(": ")[0]
