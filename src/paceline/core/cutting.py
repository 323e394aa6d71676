"""Find a layer before which a model can be split into body (first layers) and head (the rest)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator

from paceline.core.errors import InvalidInput
from paceline.core.names import not_known
from paceline.core.workload import Workload


def _as_name(value: object) -> object:
    """Convert an index in `nn.Sequential` to a layer's name."""
    if isinstance(value, float):  # layers 7.1 and 7.10 would be the same float
        raise InvalidInput("head", "needs quotes", got=value, hint=f"""write head='"{value}"'""")
    return str(value) if type(value) is int else value


# Used instead of the name of the head's first layer if the head has no layers, only the loss.
LOSS = "loss"
LayerName = Annotated[str, BeforeValidator(_as_name)]
# Function (workload, config) that returns the head's first layer, chosen by a strategy's criteria;
# raises InvalidInput if no layer meets them.
FirstOf = Callable[[Workload, Any], str]
# Function that splits the model before the named layer; raises InvalidInput if it cannot.
Attempt = Callable[[str], object]


class Split(NamedTuple):
    """A model's first layers (`body`), and the rest (`head`), which gets the body's outputs."""

    body: Workload
    head: Workload

    @property
    def first(self) -> str:
        """The name of the head's first layer; "loss" if the head has no layers."""
        return self.head.layers[0].name if self.head.layers else LOSS

    @classmethod
    def before(cls, workload: Workload, first: int) -> "Split":
        """Split before layer `first`, an index; for len(layers), the head is only the loss."""
        layers, order = workload.layers, workload.backward_order
        in_body = tuple(i for i in order if i < first)
        in_head = tuple(i - first for i in order if i >= first)
        body = replace(workload, layers=layers[:first], backward_order=in_body)
        head = replace(workload, layers=layers[first:], backward_order=in_head)
        return cls(body, replace(head, input_nbytes=layers[first - 1].activation_nbytes))

    def resized(self, num_samples: int) -> "Split":
        """Return the split with another batch size; the layers' costs stay as they are."""
        old, targets = self.body.batch_size, self.body.target_nbytes
        sizes: dict[str, Any] = {
            "batch_size": num_samples,
            "target_nbytes": None if targets is None else targets // old * num_samples,
        }
        crossing = self.head.input_nbytes // old * num_samples
        return Split(
            replace(self.body, **sizes), replace(self.head, **sizes, input_nbytes=crossing)
        )


def index_of(workload: Workload, first: str) -> int:
    """Return the index of the layer `first`; InvalidInput if the head cannot begin with it."""
    names = [layer.name for layer in workload.layers]
    if first not in names[1:]:
        also = f": a layer of {workload.name} after the first layer"
        raise not_known("head", first, names[:0:-1], also)
    if why := refusal_of(workload, first):
        raise InvalidInput.of(why)
    return names.index(first)


def with_refused_cuts(
    workload: Workload, config: Any, first_of: FirstOf, attempt: Attempt
) -> Workload:
    """Return the workload with `refused_cuts`: the layers before which a split failed.

    Tries to split the model before different layers, until one split succeeds. `first_of(workload,
    config)` chooses the next layer, which is not in `refused_cuts`; `attempt(layer)` splits the
    model before this layer. `config.head`: the layer chosen by the user, or None. Raises
    InvalidInput if no split succeeds. If the user's layer fails, the error suggests a layer that
    works.
    """
    try:
        return _tried(workload, config, first_of, attempt)
    except InvalidInput as error:
        other = None if config.head is None else _any_other(workload, config, first_of, attempt)
        if other is None:
            raise
        raise InvalidInput(error.field, error.problem, hint=f"try head={other}") from error


def refusal_of(workload: Workload, first: str) -> str | None:
    """Return why the model cannot be split before a layer; None if no such split failed."""
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
