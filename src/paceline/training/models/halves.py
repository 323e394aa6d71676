"""Cut a model into a body (first layers) and a head (last layers), like Du et al. 2017.

    scores = head(body(inputs))      # bit-identical to model(inputs)

The forward pass is traced as a graph (`torch.fx`), and the graph is cut (section 3.1 of the paper).
Only the modules that contain the layer at the cut are traced. All other modules are called
unchanged, and keep their hooks, modes and random numbers. By contrast, an export of the whole model
(`torch.distributed.pipelining`) loses hooks, and fails for the smaller last batch of an epoch.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock, get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from paceline.core.cutting import LOSS
from paceline.core.errors import InvalidInput, first_line
from paceline.core.names import not_known
from paceline.links.devices import random_numbers_restored
from paceline.training.data.batch import call, shapes_of
from paceline.training.models.layers import ROOT, layers_of

_DTYPES = (torch.float32, torch.float64)
UNTIE = "use a model with untied weights (NAME-untied), or a data-parallel strategy"
_OTHER_LAYER = "choose another layer, or a data-parallel strategy"
_MOST_NAMED = 10  # largest number of layers that an error lists
# Functions that create tensors; torch.fx records calls of these functions only on request.
_FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "zeros")
_tracing = Lock()  # one trace at a time, because torch.fx patches functions of the whole process


class Halves(NamedTuple):
    """The body and the head of a model.

    `body_names`, `head_names`: names of `body_parameters` and `head_parameters` in the whole model,
    in the same order. `crossing`: shape of the body's output for one sample.
    """

    body: nn.Module
    head: nn.Module
    body_names: tuple[str, ...]
    head_names: tuple[str, ...]
    crossing: tuple[int, ...] = ()

    @property
    def body_parameters(self) -> list[nn.Parameter]:
        """The body's trainable parameters."""
        return trainable(self.body)

    @property
    def head_parameters(self) -> list[nn.Parameter]:
        """The head's trainable parameters."""
        return trainable(self.head)


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """Return a module's trainable parameters; a shared parameter appears once."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def cut(model: nn.Module, inputs: Any, first: str) -> Halves:
    """Cut `model` into body and head before the layer `first`.

    `first`: the name of a layer in `layers_of(model)`. If `first` is "loss", the body is the whole
    model. The halves share the model's modules. The modules that contain the layer are traced in
    training mode.

    `inputs`: two or more samples on the model's device, which test the cut: the halves must return
    the model's output, a tensor or a pytree of tensors. Parameters, buffers, modes and random state
    do not change. During this call, no other thread may run a model, because `cut` temporarily sets
    torch's global seed.

    Raises InvalidInput if a layer or connection prevents the cut; the error names it.
    """
    apart = f"{type(model).__name__} cannot be cut before {first!r}"
    layers = layers_of(model)
    choices = [layer.name for layer in layers if layer.name != ROOT]
    is_whole = first == LOSS and LOSS not in choices
    if not is_whole and first not in choices:
        if why := tied(model, first):
            raise _refused(apart, why, hint=UNTIE)
        raise not_known("head", first, choices[-_MOST_NAMED:])
    parameters = [own for layer in layers for own in layer.parameters]
    for name, parameter in parameters:
        if parameter.dtype != parameters[0][1].dtype or parameter.dtype not in _DTYPES:
            problem = f"must have only float32 or only float64 parameters; check {name!r}"
            raise InvalidInput("model", problem, got=parameter.dtype)
    with _state_restored(model):
        model.train()
        halves = (model, nn.Identity()) if is_whole else _halves(model, inputs, first, apart)
        body, head = halves
        for name in _shared(model, body, head):  # the halves would train separate copies
            raise _refused(apart, f"layers before and after the cut use {name!r}", hint=UNTIE)
        if not trainable(body):
            raise _refused(apart, "no layer before the cut is trainable")
        crossing = _compared(model, body, head, inputs, apart)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    in_body, in_head = (tuple(names[id(one)] for one in trainable(half)) for half in (body, head))
    return Halves(body, head, in_body, in_head, crossing)


def _shared(model: nn.Module, body: nn.Module, head: nn.Module) -> list[str]:
    """Return the names of the model's parameters and buffers that both halves use."""
    of_body, of_head = (
        {id(tensor) for tensor in (*half.parameters(), *half.buffers())} for half in (body, head)
    )
    named = (*model.named_parameters(), *model.named_buffers())
    return [name for name, tensor in named if id(tensor) in of_body & of_head]


def _refused(of: str, why: str, *, hint: str = "") -> InvalidInput:
    return InvalidInput("head", f"{of}: {why}", hint=hint)


def tied(model: nn.Module, first: str | None) -> str:
    """Describe, as text, a weight that a layer shares with an embedding; "" if there is none.

    `first`: name of the layer; None checks all layers.
    """
    known: dict[int, str] = {}
    for name, module in model.named_modules():
        for key, one in module.named_parameters(recurse=False):
            if first in (None, name) and id(one) in known:
                return f"'{name}.{key}' is tied to {known[id(one)]!r}"
            if isinstance(module, nn.Embedding):
                known[id(one)] = f"{name}.{key}"
    return ""


@contextmanager
def values_restored(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Return a context that restores the values of tensors, such as a model's buffers, on exit."""
    saved = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in saved:
                tensor.copy_(before)


@contextmanager
def _state_restored(model: nn.Module) -> Iterator[None]:
    """Return a context that, on exit, restores the model's modes, buffers and random state.

    On exit, also removes the attributes that the tracer has added to the model.
    """
    modes = {module: module.training for module in model.modules()}
    before = set(vars(model))
    devices = {parameter.device for parameter in model.parameters() if not parameter.is_meta}
    try:
        with random_numbers_restored(devices), values_restored(model.buffers()):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        # The tracer stores constant tensors as attributes of the model.
        for name in set(vars(model)) - before:
            if name.startswith("_tensor_constant"):
                delattr(model, name)


def _compared(
    model: nn.Module, body: nn.Module, head: nn.Module, inputs: Any, of: str
) -> tuple[int, ...]:
    """Check that the halves return the model's output; return the activations' shape per sample.

    `of`: the beginning of error messages.
    """
    num_samples = len(tree_leaves(inputs)[0])
    try:
        torch.manual_seed(0)
        with values_restored(model.buffers()):
            whole = call(model, inputs)
        torch.manual_seed(0)
        activations = call(body, inputs)
        if not isinstance(activations, Tensor) or activations.dtype not in _DTYPES:
            kind = getattr(activations, "dtype", type(activations).__name__)
            raise _refused(of, f"the value at the cut is {kind}, not a float32 or float64 tensor")
        if not activations.requires_grad:
            raise _refused(of, "the value at the cut does not depend on any parameter")
        if activations.dim() == 0 or len(activations) != num_samples:
            shape = tuple(activations.shape)
            raise _refused(of, f"the value at the cut has shape {shape}, not {num_samples} rows")
        outputs = head(activations.detach().requires_grad_())
    except InvalidInput:
        raise
    except Exception as error:
        problem = f"running the halves on a batch of shape {shapes_of(inputs)} failed"
        raise _refused(of, f"{problem}: {first_line(error)}") from error
    # Tolerate GPU kernels that add in another order. For meta tensors, only shapes are compared.
    rtol, atol = (0.0, 0.0) if activations.device.type == "cpu" else (1e-3, 1e-5)
    (found, form), (expected, form_of_whole) = tree_flatten(outputs), tree_flatten(whole)
    try:
        if form != form_of_whole:
            raise TypeError("the pytrees have different structures")
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, equal_nan=True)
    except (AssertionError, TypeError) as error:
        problem = f"the halves do not return the model's output: {first_line(error)}"
        raise _refused(of, problem, hint=_OTHER_LAYER) from error
    return tuple(activations.shape[1:])


def _halves(model: nn.Module, inputs: Any, first: str, refusal: str) -> tuple[nn.Module, nn.Module]:
    """Trace the model, and cut its graph before the layer `first`; return body and head.

    `refusal`: the beginning of error messages.
    """
    try:
        nodes = traced(model, inputs, model.get_submodule(first))
    except Exception as error:
        problem = f"tracing the forward pass failed: {first_line(error)}"
        raise _refused(refusal, problem, hint=_OTHER_LAYER) from error
    border = next((i for i, node in enumerate(nodes) if _uses(node, first)), None)
    if border is None:
        raise _refused(refusal, "the forward pass never calls the layer at the cut")
    crossing = _crossing(nodes, border, refusal)
    body, head = fx.Graph(), fx.Graph()
    inside = _copy(nodes[:border], body, {})
    body.output(inside[crossing])
    _copy(nodes[border:], head, {crossing: head.placeholder("activations")})
    called = _Called(fx.GraphModule(model, body, "Body"), inputs)
    return called, fx.GraphModule(model, head, "Head")


def _uses(node: fx.Node, layer: str) -> bool:
    """Return whether a node calls the layer's module, or reads a parameter of the layer."""
    if node.op == "call_module" and node.target == layer:
        return True
    read = [str(one.target) for one in node.all_input_nodes if one.op == "get_attr"]
    return any(name.rpartition(".")[0] == layer for name in read)


def _crossing(nodes: Sequence[fx.Node], border: int, refusal: str) -> fx.Node:
    """Return the body's node whose value the head uses; raise InvalidInput for none or several.

    `border`: index in `nodes` of the head's first node. `refusal`: the beginning of errors.
    """
    before = {node for node in nodes[:border] if node.op != "get_attr"}
    after = (node for node in nodes[border:] if node.op != "get_attr")
    used = (value for node in after for value in node.all_input_nodes if value in before)
    crossing = list(dict.fromkeys(used))
    if not crossing:
        raise _refused(refusal, "the layers after the cut use no value of the layers before")
    if any(node.op == "placeholder" for node in crossing):
        raise _refused(refusal, "the layers after the cut also use the model's input")
    if len(crossing) > 1:
        values = ", ".join(map(_described, crossing[:_MOST_NAMED]))
        problem = f"the layers after the cut use {len(crossing)} values, not one: {values}"
        raise _refused(refusal, problem, hint="choose a layer with a single input value")
    return crossing[0]


def _described(node: fx.Node) -> str:
    if node.op == "call_module":
        return repr(node.target)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "?")
    sources = [str(one.target) for one in node.all_input_nodes if one.op == "call_module"]
    return f"{name}() of {sources[0]!r}" if sources else f"{name}()"


def _copy(
    nodes: Iterable[fx.Node], graph: fx.Graph, known: dict[fx.Node, fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Copy nodes, and the parameters that they read, into a graph.

    Returns `known`, which maps nodes to their copies, with the new copies added.
    """

    def value(node: fx.Node) -> fx.Node:
        if node.op == "get_attr" and node not in known:
            known[node] = graph.node_copy(node)
        return known[node]

    for node in nodes:
        if node.op != "get_attr":
            known[node] = graph.node_copy(node, value)
    return known


class _Called(nn.Module):
    """Takes the model's arguments, and calls a graph with the tensors in these arguments."""

    def __init__(self, graph: nn.Module, inputs: Any) -> None:
        super().__init__()
        self.graph = graph
        tree: TreeSpec = call(lambda *args, **kwargs: tree_flatten((args, kwargs))[1], inputs)
        # Use a closure: with the tree as an attribute, copying this module would cause a warning.
        self._leaves_of: Callable[..., list[Any]] = lambda *called: tree.flatten_up_to(called)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph on arguments with the same pytree structure as the traced inputs."""
        return self.graph(*self._leaves_of(args, kwargs))


def traced(model: nn.Module, inputs: Any, first: nn.Module) -> list[fx.Node]:
    """Trace a forward pass of the modules that contain `first`; return the graph's nodes.

    The graph has a placeholder for each tensor in the inputs, which may be nested. Input sizes are
    constants, so that the forward pass may compare sizes. Only the number of samples is not a
    constant, because an epoch's last batch may be smaller. Only one thread traces at a time; calls
    in other threads are not affected. Raises the errors of the forward pass.
    """
    with _tracing:
        nodes = list(_Around(inputs, model, first).trace(model).nodes)
    for node in nodes:
        node.meta.pop("is_wrapped", None)  # keep torch.fx.wrap out of the halves' code
    # Leave out unused calls of size(), which `_Input.shape` has recorded.
    return [one for one in nodes if (one.op, one.target) != ("call_method", "size") or one.users]


class _Around(fx.Tracer):
    """Traces the modules that contain the layer `first`; records other modules as single calls."""

    def __init__(self, inputs: Any, model: nn.Module, first: nn.Module) -> None:
        super().__init__(autowrap_functions=tuple(getattr(torch, name) for name in _FACTORIES))
        self._autowrap_search.append(torch)
        self._tensors: list[Tensor]
        self._tree: TreeSpec
        self._tensors, self._tree = tree_flatten(inputs)
        self._around = {
            module
            for module in model.modules()
            if module is not first and any(part is first for part in module.modules())
        }
        self._thread = get_ident()

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Record a module call of the tracing thread; execute module calls of other threads."""
        if get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a call of the module `m` becomes a single node of the graph."""
        return m not in self._around

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[[nn.Module], Any], list[nn.Module]]:
        """Return a function, which calls a model with placeholders, and its list of arguments."""
        placeholders = [
            _Input(self.create_node("placeholder", f"input_{i}", (), {}), self, tensor.shape)
            for i, tensor in enumerate(self._tensors)
        ]
        inputs = tree_unflatten(placeholders, self._tree)

        def forward(model: nn.Module) -> Any:
            return call(partial(root_fn, model), inputs)

        return forward, [self.root]


class _Input(fx.Proxy):
    """A placeholder with known sizes, except the number of samples."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, sizes: torch.Size) -> None:
        super().__init__(node, tracer)
        self._sizes = sizes

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape: a proxy for the number of samples, and constants for the other sizes."""
        num_samples = self.tracer.create_proxy("call_method", "size", (self, 0), {})
        return num_samples, *self._sizes[1:]

    def size(self, dim: int | None = None) -> Any:
        """Return the size of dimension `dim`, or all sizes if `dim` is None."""
        return self.shape if dim is None else self.shape[dim]

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self._sizes)

    def dim(self) -> int:
        """Return the number of dimensions."""
        return self.ndim
