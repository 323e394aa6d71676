"""A model as a body, and the chain of layers behind it that are split.

The modules *around* the head's layers are traced (`torch.fx`); every other module is called as it
is. What stands between the layers must work on each value by itself, or be a dropout: then it does
not matter that each rank has some columns only.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from paceline.core.errors import InvalidInput

_ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Sigmoid, nn.LogSigmoid, nn.Hardsigmoid, nn.Tanh, nn.Hardtanh, nn.Hardswish, nn.Tanhshrink),
    *(nn.Softplus, nn.Softsign, nn.Softshrink, nn.Hardshrink, nn.Threshold, nn.Identity),
)
_FUNCTIONS = (
    *(F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.gelu, F.silu, F.mish, F.softplus, F.tanh),
    *(F.hardtanh, F.hardsigmoid, F.hardswish, F.sigmoid, F.logsigmoid),
    *(torch.relu, torch.tanh, torch.sigmoid),
)
_METHODS = ("relu", "tanh", "sigmoid")
_LAYERS = (nn.Linear, nn.BatchNorm1d)


class Elementwise(nn.Module):
    """A function of each value, with the other arguments that the model gives it."""

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self._function, self._args = function, args
        self._kwargs = {key: value for key, value in kwargs.items() if key != "inplace"}

    def forward(self, values: Tensor) -> Tensor:
        """Return the function of the values."""
        result: Tensor = self._function(values, *self._args, **self._kwargs)
        return result


@dataclass(frozen=True)
class Link:
    """A layer of the head, and the modules (each with its name) that follow it."""

    name: str
    module: nn.Linear | nn.BatchNorm1d
    after: tuple[tuple[str, nn.Module], ...]


@dataclass(frozen=True)
class Parts:
    """The body, whose modules are the model's own under the same names, and the head's links."""

    body: nn.Module
    links: tuple[Link, ...]


def apart(model: nn.Module, names: Sequence[str], label: str) -> Parts:
    """Return the parts of `model`, whose head are the layers of these names, in forward order.

    InvalidInput says which layer or connection keeps the head from being split.
    """
    refusal = f"head: {label} cannot be split from layer {names[0]!r} on"
    try:
        nodes = list(_Around(model, names).trace(model).nodes)
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [""])[0]
        raise InvalidInput(
            f"{refusal}: the forward pass around it cannot be traced: "
            f"{type(error).__name__}: {first_line}"
        ) from error
    border = next(
        (i for i, one in enumerate(nodes) if one.op == "call_module" and one.target == names[0]),
        None,
    )
    if border is None:
        raise InvalidInput(f"{refusal}: its forward pass never calls that layer")
    if any(node.target is F.dropout for node in nodes):
        raise InvalidInput(f"{refusal}: it calls dropout() around it; use nn.Dropout")
    links = _links(model, nodes[border:], names, refusal)
    body = _body(model, nodes[:border], nodes[border].all_input_nodes[0])
    _check_apart(model, body, links, refusal)
    return Parts(body, links)


class _Around(fx.Tracer):
    """Traces the modules around the head's layers; the layers and all others are single calls."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        layers = {model.get_submodule(name) for name in names}
        self._around = {
            module
            for module in model.modules()
            if module not in layers and (layers & set(module.modules()) or _only_groups(module))
        }

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a call of the module is one node of the graph."""
        return m not in self._around


def _only_groups(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and not list(module.parameters())


def _body(model: nn.Module, nodes: Sequence[fx.Node], last: fx.Node) -> nn.Module:
    graph, known = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in nodes:
        known[node] = graph.node_copy(node, known.__getitem__)
    graph.output(known[last])
    return fx.GraphModule(model, graph, "Body")


def _links(
    model: nn.Module, nodes: Sequence[fx.Node], names: Sequence[str], refusal: str
) -> tuple[Link, ...]:
    """Return the links of nodes that follow one another, up to the model's output."""
    chain: list[tuple[str, nn.Linear | nn.BatchNorm1d, list[tuple[str, nn.Module]]]] = []
    value, left = nodes[0].all_input_nodes[0], list(names)
    for node in nodes:
        if node.all_input_nodes != [value]:
            raise InvalidInput(
                f"{refusal}: {_said(node)} takes something else than the result of {_said(value)}; "
                "the head must be a chain"
            )
        if node.op == "output":
            if node.args[0] is not value:
                raise InvalidInput(f"{refusal}: the model must return its scores, and only these")
            break
        value = node
        if left and node.op == "call_module" and node.target == left[0]:
            name = left.pop(0)
            chain.append((name, _layer(model.get_submodule(name), name, refusal), []))
        else:
            chain[-1][2].append((_said(node), _between(model, node, refusal)))
    if left:
        raise InvalidInput(f"{refusal}: its forward pass does not call layer {left[0]!r} after it")
    return tuple(Link(name, module, tuple(after)) for name, module, after in chain)


def _layer(module: nn.Module, name: str, refusal: str) -> nn.Linear | nn.BatchNorm1d:
    if not isinstance(module, _LAYERS) or type(module).forward not in _FORWARDS:
        raise InvalidInput(
            f"{refusal}: layer {name!r} is {type(module).__name__}, which works on all outputs of "
            "a sample together; choose Linear and BatchNorm1d, or a head that begins after it"
        )
    frozen = [key for key, one in module.named_parameters() if not one.requires_grad]
    if frozen:
        raise InvalidInput(f"{refusal}: {name}.{frozen[0]} is frozen; train all of a head's layers")
    return module


_FORWARDS = (nn.Linear.forward, nn.BatchNorm1d.forward)


def _between(model: nn.Module, node: fx.Node, refusal: str) -> nn.Module:
    """Return the module that does what a node between two layers does to a part of the columns."""
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        kind = type(module)
        if kind is nn.Dropout:
            return module
        if kind in _ELEMENTWISE:
            own = copy.copy(module)  # the model's own may change its input in place
            if hasattr(own, "inplace"):
                vars(own)["inplace"] = False
            return own
        if kind is nn.Flatten and module.start_dim == 1:
            return nn.Identity()
        what = f"{node.target!r} is {kind.__name__}"
    elif node.op == "call_function" and node.target in _FUNCTIONS:
        return Elementwise(node.target, node.args[1:], dict(node.kwargs))
    elif node.op == "call_method" and node.target in _METHODS:
        return Elementwise(getattr(torch, str(node.target)), (), {})
    else:
        what = f"{_said(node)} is called"
    raise InvalidInput(
        f"{refusal}: {what} there, and only activations of each value and nn.Dropout can stand "
        "between layers that are split"
    )


def _said(node: fx.Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    if node.op == "output":
        return "the model's output"
    return f"{getattr(node.target, '__name__', node.target)}()"


def _check_apart(model: nn.Module, body: nn.Module, links: Sequence[Link], refusal: str) -> None:
    """Refuse parameters that both parts use: each would have its own."""
    in_body = {id(parameter) for parameter in body.parameters()}
    for link in links:
        for key, parameter in link.module.named_parameters():
            if id(parameter) in in_body:
                raise InvalidInput(f"{refusal}: the body uses {link.name}.{key}, too")
    if not any(parameter.requires_grad for parameter in body.parameters()):
        raise InvalidInput(f"{refusal}: nothing before it is trained")
