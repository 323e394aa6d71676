"""Limits of fields in records from peers, in addition to `paceline.core.reading`.

Violations raise InvalidInput.
"""

from typing import Annotated

from pydantic import FailFast, Field

from paceline.core.errors import InvalidInput
from paceline.core.plan import Resource
from paceline.core.timeline import Span

MOST_SPANS = 200_000  # most spans from a worker
# Longest time on one machine's clock: a century.
Seconds = Annotated[float, Field(ge=0, le=3.2e9, allow_inf_nan=False)]
PerSecond = Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)]
# FailFast: errors for all spans would use more memory than the message.
Spans = Annotated[list[Span], FailFast(), Field(max_length=MOST_SPANS)]
_MOST_RESOURCES, _LONGEST_NAME = 16, 200


def check_spans(spans: list[Span], worker: int, what: str) -> None:
    """Raise InvalidInput for another worker's spans, and for invalid times."""
    for span in spans:
        if span.worker != worker:
            raise InvalidInput(what, f"a span of worker {span.worker}")
        if not (0 <= span.start_s <= span.end_s < float("inf")):
            raise InvalidInput(what, f"a span from {span.start_s} to {span.end_s} s")
        if not 0 <= span.step < 2**31 or len(span.part) > _LONGEST_NAME:
            raise InvalidInput(what, f"a span of step {span.step}, part {span.part[:20]!r}")
        _check_resources(span.on, what)


def _check_resources(on: tuple[Resource, ...], what: str) -> None:
    if len(on) > _MOST_RESOURCES or any(len(one.owner) > _LONGEST_NAME for one in on):
        raise InvalidInput(what, f"a span on {len(on)} resources, or one with a name too long")
