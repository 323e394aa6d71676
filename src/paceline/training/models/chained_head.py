"""Split a model into a body and a head: final layers divided among ranks.

If the head is a single layer whose output the model returns, this layer is replaced by an identity
module; the rest is the body. Then the forward pass is not traced, and may contain assertions and
loops. For other heads, the modules that contain the head's layers are traced (`torch.fx`).
Operations between the head's layers must be elementwise or dropout, because each rank has only some
columns of the activations.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from paceline.core.errors import InvalidInput, first_line
from paceline.training.data.batch import call

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
Operation = Callable[[Tensor], Tensor]  # a dropout module, or an elementwise operation
_Refusal = Callable[..., InvalidInput]
_LAYERS = (nn.Linear, nn.BatchNorm1d)
_FORWARDS = (nn.Linear.forward, nn.BatchNorm1d.forward)  # layers that override forward are refused


@dataclass(frozen=True)
class TracedLayer:
    """A layer of the head; `following`: (name, operation) pairs between it and the next layer."""

    name: str
    module: nn.Linear | nn.BatchNorm1d
    following: tuple[tuple[str, Operation], ...] = ()


def partition(
    model: nn.Module, names: Sequence[str], label: str, inputs: Any
) -> tuple[nn.Module, tuple[TracedLayer, ...]]:
    """Split a model into a body and a head; the head consists of the layers `names`.

    The body shares the model's modules, under the same names. `label`: name of the model in errors.
    `inputs`: samples with which `bypassed` tries to split off a single layer without tracing.
    Raises InvalidInput if a layer or connection prevents the split.
    """

    def refusal(problem: str, hint: str = "") -> InvalidInput:
        where = f"cannot begin at layer {names[0]!r} of {label}"
        return InvalidInput("head", f"{where}: {problem}", hint=hint)

    body = bypassed(model, names[0], inputs) if len(names) == 1 else None
    if body is None:
        body, head = _traced(model, names, refusal)
    else:
        layer = _layer(model.get_submodule(names[0]), names[0], refusal)
        head = (TracedLayer(names[0], layer),)
    in_body = {id(parameter) for parameter in body.parameters()}
    for one in head:  # body and head would train separate copies of a shared parameter
        for key, parameter in one.module.named_parameters():
            if id(parameter) in in_body:
                raise refusal(f"an earlier layer also uses {one.name}.{key}")
    if not any(parameter.requires_grad for parameter in body.parameters()):
        raise refusal("no layer before the head is trainable")
    return body, head


def _traced(
    model: nn.Module, names: Sequence[str], refusal: _Refusal
) -> tuple[nn.Module, tuple[TracedLayer, ...]]:
    try:
        nodes = list(_HeadTracer(model, names).trace(model).nodes)
    except Exception as error:
        raise refusal(f"tracing the forward pass failed: {first_line(error)}") from error
    called = [node.target if node.op == "call_module" else None for node in nodes]
    if names[0] not in called:
        raise refusal("the forward pass never calls the head's first layer")
    border = called.index(names[0])
    if any(node.target is F.dropout for node in nodes):
        raise refusal("the model calls the function dropout()", hint="use nn.Dropout")
    head = _head(model, nodes[border:], names, refusal)
    graph, known = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in nodes[:border]:
        known[node] = graph.node_copy(node, known.__getitem__)
    graph.output(known[nodes[border].all_input_nodes[0]])
    return fx.GraphModule(model, graph, "Body"), head


class _HeadTracer(fx.Tracer):
    """Traces only modules that contain a head layer, and Sequentials without parameters.

    A call of any other module becomes a single node of the graph.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        layers = {model.get_submodule(name) for name in names}
        self._traced = set()
        for module in set(model.modules()) - layers:
            is_container = isinstance(module, nn.Sequential) and not list(module.parameters())
            if is_container or layers & set(module.modules()):
                self._traced.add(module)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a call of the module `m` becomes a single node of the graph."""
        return m not in self._traced


def _head(
    model: nn.Module, nodes: Sequence[fx.Node], names: Sequence[str], refusal: _Refusal
) -> tuple[TracedLayer, ...]:
    """Return the head's layers, with the operations between them.

    `nodes`: the graph's nodes, from the head's first layer on. Raises InvalidInput unless each node
    uses only the output of the previous node. `refusal(problem, hint)` creates this error.
    """
    chain: list[tuple[str, nn.Linear | nn.BatchNorm1d, list[tuple[str, Operation]]]] = []
    value, left = nodes[0].all_input_nodes[0], list(names)
    for node in nodes:
        if node.all_input_nodes != [value]:
            problem = f"{_name(node)} must have the output of {_name(value)} as its only input"
            raise refusal(problem, hint="the head must be a chain of layers")
        if node.op == "output":
            if node.args[0] is not value:
                raise refusal("the model must return only the output of its last layer")
            break
        value = node
        if left and node.op == "call_module" and node.target == left[0]:
            name = left.pop(0)
            chain.append((name, _layer(model.get_submodule(name), name, refusal), []))
        else:
            chain[-1][2].append((_name(node), _between(model, node, refusal)))
    if left:
        raise refusal(f"the forward pass does not call layer {left[0]!r} after {names[0]!r}")
    return tuple(TracedLayer(name, module, tuple(after)) for name, module, after in chain)


def _layer(module: nn.Module, name: str, refusal: _Refusal) -> nn.Linear | nn.BatchNorm1d:
    if not isinstance(module, _LAYERS) or type(module).forward not in _FORWARDS:
        problem = f"layer {name!r} is {type(module).__name__}, not Linear or BatchNorm1d"
        raise refusal(problem, hint=f"choose a head that begins after {name!r}")
    frozen = [key for key, one in module.named_parameters() if not one.requires_grad]
    if frozen:
        raise refusal(f"parameter {name}.{frozen[0]} is frozen (requires_grad=False)")
    return module


def _between(model: nn.Module, node: fx.Node, refusal: _Refusal) -> Operation:
    """Return the operation of `node`; raise InvalidInput unless it is elementwise or dropout."""
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        kind = type(module)
        if kind is nn.Dropout:
            return module
        if kind in _ELEMENTWISE:
            # Copy without `inplace`, which would overwrite outputs that backward needs.
            own = copy.copy(module)
            if hasattr(own, "inplace"):
                vars(own)["inplace"] = False
            return own
        if kind is nn.Flatten and module.start_dim == 1:
            return nn.Identity()
        what = f"{node.target!r} is {kind.__name__}"
    elif node.op == "call_function" and node.target in _FUNCTIONS:
        function: Any = node.target
        options = {key: value for key, value in node.kwargs.items() if key != "inplace"}
        return lambda values: function(values, *node.args[1:], **options)
    elif node.op == "call_method" and node.target in _METHODS:
        method: Operation = getattr(torch, str(node.target))
        return method
    else:
        what = f"{_name(node)} is called"
    raise refusal(f"{what} in the head; only elementwise functions and nn.Dropout are supported")


def _name(node: fx.Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    if node.op == "output":
        return "the model's output"
    return f"{getattr(node.target, '__name__', node.target)}()"


@torch.no_grad()
def bypassed(model: nn.Module, name: str, inputs: Any) -> nn.Module | None:
    """Return the model without its final layer `name`; None if the layer is not final.

    The new model (the body) returns the layer's input. The body is tried on `inputs` in evaluation
    mode; if this call fails, the layer is not final. Later calls of the body raise InvalidInput
    if they would not return the layer's input.
    """
    instead, taken = nn.Identity(), list[Any]()
    instead.register_forward_hook(lambda module, arguments, values: taken.append(values))
    body = _without(model, name, instead)
    # Copy the dict of hooks, so that `model` itself gets no hook.
    body._forward_hooks = type(model._forward_hooks)(model._forward_hooks)

    def check(module: nn.Module, arguments: Any, found: Any) -> None:
        calls = taken.copy()
        taken.clear()
        if len(calls) != 1 or found is not calls[0]:
            problem = f"layer {name!r} must be called once, and the model must return its output"
            raise InvalidInput("head", problem, got=f"{len(calls)} calls")

    body.register_forward_hook(check)
    was_training = model.training
    try:
        call(body.eval(), inputs)
    except Exception:  # the layer is not final
        return None
    finally:
        body.train(was_training)
    return body


def _without(model: nn.Module, name: str, instead: nn.Module) -> nn.Module:
    own = copy.copy(model)
    own._modules = dict(own._modules)
    child, _, rest = name.partition(".")
    within = own._modules[child]
    assert within is not None  # because `model` has the layer `name`
    own._modules[child] = _without(within, rest, instead) if rest else instead
    return own
