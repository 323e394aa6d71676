"""Try where a model can be cut in two, for strategies that split it into a body and a head."""

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BeforeValidator

from paceline.core.errors import InvalidInput
from paceline.core.workload import Workload


def _as_name(value: object) -> object:
    """Return the number of a layer of `nn.Sequential` as its name; other values as they are."""
    if isinstance(value, float):  # 7.1 and 7.10 are two layers, and one number
        raise InvalidInput(
            "head", f"""a layer's name such as {value} needs quotes, as head='"{value}"'"""
        )
    return str(value) if type(value) is int else value


LOSS = "loss"  # the name of a head without layers
LayerName = Annotated[str, BeforeValidator(_as_name)]
# Returns a strategy's choice of the head's first layer; InvalidInput if no layer will do.
FirstOf = Callable[[Workload, Any], str]
Attempt = Callable[[str], object]  # cuts the model before a layer; InvalidInput if it cannot be


def with_refused_cuts(
    workload: Workload, config: Any, first_of: FirstOf, attempt: Attempt
) -> Workload:
    """Return the workload with the cuts that were tried and refused before one was possible.

    `first_of(workload, config)` chooses no layer that `workload.refused_cuts` names. `config.head`
    is the layer that a user has named, or None. Raises InvalidInput if no layer will do; if the
    named one will not, it says which does.
    """
    try:
        return _tried(workload, config, first_of, attempt)
    except InvalidInput as error:
        other = None if config.head is None else _any_other(workload, config, first_of, attempt)
        if other is None:
            raise
        raise InvalidInput(error.field, error.problem, hint=f"head={other} would do") from error


def refusal_of(workload: Workload, first: str) -> str | None:
    """Return why the model could not be cut before a layer, or None if that is not known."""
    return dict(workload.refused_cuts).get(first)


def _tried(workload: Workload, config: Any, first_of: FirstOf, attempt: Attempt) -> Workload:
    while True:
        first = first_of(workload, config)
        try:
            attempt(first)
        except InvalidInput as error:
            refused = (*workload.refused_cuts, (first, str(error)))
            workload = replace(workload, refused_cuts=refused)
        else:
            return workload


def _any_other(workload: Workload, config: Any, first_of: FirstOf, attempt: Attempt) -> str | None:
    anywhere = replace(config, head=None)
    try:
        return first_of(_tried(workload, anywhere, first_of, attempt), anywhere)
    except InvalidInput:
        return None
