"""Check refusals by their fields, so that tests do not depend on sentences."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from paceline.core.error_lines import FLAGS
from paceline.core.errors import InvalidInput

_SETTINGS = {flag: name for name, flag in FLAGS.items()}


@contextmanager
def refused(field: object, **known: Any) -> Iterator[pytest.ExceptionInfo[InvalidInput]]:
    """Expect a one-line InvalidInput with this field, and attributes such as `got` and `hint`.

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
    """Return the field of the only refusal that a command printed.

    Its form is "paceline: FIELD: problem" or "paceline: FIELD must be ...". For an option, return
    the name of its setting.
    """
    (line,) = {one for one in err.splitlines() if one.startswith("paceline: ")}
    field = InvalidInput.of(line.removeprefix("paceline: ")).field
    return (
        _SETTINGS.get(field, field.removeprefix("--").replace("-", "_"))
        if field[0] == "-"
        else field
    )
