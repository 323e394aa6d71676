"""A model's forward pass as a graph, and the two graphs that it is cut into.

Only the modules *around* the layer at the cut are traced (`torch.fx`); every other module is called
as it is, with its hooks, its mode and its random numbers. `torch.distributed.pipelining` would
export the whole model instead, into operations: without hooks, with the example's batch size in
every `view`, which the last batch of an epoch does not have, and with the layer's own `forward`
replaced.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import fx, nn

from paceline.core.errors import InvalidInput


def halves_of(model: nn.Module, first: str, label: str) -> tuple[nn.Module, nn.Module]:
    """Return modules of what runs before the layer `first` of `model` is called, and of the rest.

    They consist of the modules and parameters of `model`, under the same names. InvalidInput says
    what keeps the model from being cut there.
    """
    refusal = f"head: {label} cannot be cut before {first!r}"
    tracer = _Around(model, model.get_submodule(first))
    with _without_constants(model, tracer):
        try:
            nodes = list(tracer.trace(model).nodes)
        except Exception as error:
            raise InvalidInput(
                f"{refusal}: the forward pass around that layer cannot be traced: "
                f"{type(error).__name__}: {_first_line(error)}"
            ) from error
        border = _border(nodes, first)
        if border is None:
            raise InvalidInput(f"{refusal}: its forward pass never calls that layer")
        body, head = _divided(nodes, border, _crossing(nodes, border, refusal))
        return fx.GraphModule(model, body, "Body"), fx.GraphModule(model, head, "Head")


class _Around(fx.Tracer):
    """Traces the modules around a layer; the layer itself and all others are single calls."""

    def __init__(self, model: nn.Module, first: nn.Module) -> None:
        super().__init__()
        self._around = {
            module
            for module in model.modules()
            if module is not first and any(part is first for part in module.modules())
        }

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a call of the module is one node of the graph."""
        return m not in self._around


@contextmanager
def _without_constants(model: nn.Module, tracer: fx.Tracer) -> Iterator[None]:
    """Remove what a tracer adds to a model: the tensors that its forward pass makes of numbers."""
    before = set(vars(model))
    try:
        yield
    finally:
        for name in set(getattr(tracer, "tensor_attrs", {}).values()) & set(vars(model)) - before:
            delattr(model, name)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _border(nodes: Sequence[fx.Node], first: str) -> int | None:
    """Return the index of the node that first uses the layer's module or its parameters."""
    places = {node: index for index, node in enumerate(nodes)}
    uses: list[int] = []
    for node in nodes:
        if node.op == "call_module" and node.target == first:
            uses.append(places[node])
        elif node.op == "get_attr" and str(node.target).rpartition(".")[0] == first:
            uses += [places[user] for user in node.users]
    return min(uses, default=None)


def _crossing(nodes: Sequence[fx.Node], border: int, refusal: str) -> fx.Node:
    """Return the node whose value is all that the rest uses of what came before."""
    before = {node for node in nodes[:border] if node.op != "get_attr"}
    after = (node for node in nodes[border:] if node.op != "get_attr")
    used = (value for node in after for value in node.all_input_nodes if value in before)
    crossing = list(dict.fromkeys(used))
    if any(node.op == "placeholder" for node in crossing):
        raise InvalidInput(
            f"{refusal}: the model's input is used behind the cut, too, and only a body has it"
            if len(crossing) > 1
            else f"{refusal}: it takes the model's input itself, which leaves nothing for the body"
        )
    if len(crossing) != 1:
        raise InvalidInput(
            f"{refusal}: {len(crossing)} values are used behind the cut, the results of "
            f"{', '.join(map(_said, crossing))}, and one can cross it; choose a layer that no "
            "connection passes by"
            if crossing
            else f"{refusal}: it takes in nothing that was computed before"
        )
    return crossing[0]


def _said(node: fx.Node) -> str:
    if node.op == "call_module":
        return repr(node.target)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "?")
    sources = [str(one.target) for one in node.all_input_nodes if one.op == "call_module"]
    return f"{name}() of {sources[0]!r}" if sources else f"{name}()"


def _divided(nodes: Sequence[fx.Node], border: int, crossing: fx.Node) -> tuple[fx.Graph, fx.Graph]:
    body, head = fx.Graph(), fx.Graph()
    inside = _copy(nodes[:border], body, {})
    body.output(inside[crossing])
    _copy(nodes[border:], head, {crossing: head.placeholder("activations")})
    return body, head


def _copy(
    nodes: Iterable[fx.Node], graph: fx.Graph, known: dict[fx.Node, fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Copy nodes into a graph, and the parameters that they read wherever those were fetched."""

    def value(node: fx.Node) -> fx.Node:
        if node.op == "get_attr" and node not in known:
            known[node] = graph.node_copy(node)
        return known[node]

    for node in nodes:
        if node.op != "get_attr":
            known[node] = graph.node_copy(node, value)
    return known
