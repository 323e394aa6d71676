"""result.json of a folder: whose it is, and what it says."""

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from paceline.core.errors import InvalidInput
from paceline.settings import first_fault

Record = TypeVar("Record", bound=BaseModel)
Other = TypeVar("Other", bound=BaseModel)


class _Sort(BaseModel):
    """What tells results of one sort from others."""

    kind: str | None = None
    origin: str | None = None


def read_kind(
    folder: Path, kind: str, record: type[Record], rehearsed: type[Other] | None = None
) -> Record | Other | None:
    """Return the result in a folder, or None if it is not of this kind.

    `rehearsed` is the record of a rehearsal, where that is another one. InvalidInput names the
    file and what is wrong.
    """
    path = folder / "result.json"
    try:
        text = path.read_bytes()
        sort = _Sort.model_validate_json(text)
        if sort.kind != kind:
            return None
        if rehearsed is not None and sort.origin == "rehearsed":
            return rehearsed.model_validate_json(text)
        return record.model_validate_json(text)
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise InvalidInput(f"{path}: {first_fault(error)}") from None
