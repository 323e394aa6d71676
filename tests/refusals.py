"""Refusals by their fields, so that no test pins a sentence."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from paceline.core.error_lines import FLAGS
from paceline.core.errors import InvalidInput

_SETTINGS = {flag: name for name, flag in FLAGS.items()}


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
    """Return the field of the one refusal that a command printed.

    It is "paceline: FIELD: problem", or "paceline: FIELD must be ..."; an option is its setting.
    """
    (line,) = {one for one in err.splitlines() if one.startswith("paceline: ")}
    field = InvalidInput.of(line.removeprefix("paceline: ")).field
    return (
        _SETTINGS.get(field, field.removeprefix("--").replace("-", "_"))
        if field[0] == "-"
        else field
    )
