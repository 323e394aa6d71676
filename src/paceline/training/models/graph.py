"""Trace the modules that contain a layer into a graph (`torch.fx`).

The graph has a placeholder for each tensor in the model's inputs, which may be nested. Input sizes
are constants, so that the forward pass may compare sizes. Only the number of samples is not a
constant, because an epoch's last batch may be smaller.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock, get_ident
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from paceline.training.data.batch import call

# Factory functions, which torch.fx does not record by itself.
_FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "zeros")
# Tracing affects the whole process: torch.fx patches module calls, and this module patches torch's
# factory functions.
_tracing = Lock()


class Called(nn.Module):
    """Calls a graph with the tensors in the model's positional and keyword arguments."""

    def __init__(self, graph: nn.Module, inputs: Any) -> None:
        super().__init__()
        self.graph = graph
        tree: TreeSpec = call(_tree_of, inputs)
        # Use a closure: with the tree as an attribute, copying this module would cause a warning.
        self._leaves_of: Callable[..., list[Any]] = lambda *called: tree.flatten_up_to(called)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph on inputs of the traced structure."""
        return self.graph(*self._leaves_of(args, kwargs))


def _tree_of(*args: Any, **kwargs: Any) -> TreeSpec:
    return tree_flatten((args, kwargs))[1]


def traced(model: nn.Module, inputs: Any, first: nn.Module) -> list[fx.Node]:
    """Trace a forward pass of the modules that contain `first`; return the graph's nodes.

    Only one thread traces at a time; calls in other threads are not affected. Raises the errors of
    the forward pass.
    """
    with _tracing, _factories_recorded():
        return list(_Around(inputs, model, first).trace(model).nodes)


class _Around(fx.Tracer):
    """Traces the modules that contain a layer; the layer and other modules are single calls."""

    def __init__(self, inputs: Any, model: nn.Module, first: nn.Module) -> None:
        super().__init__()
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
        """Record a module call of the tracing thread; execute a call of another thread."""
        if get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return True if a call of the module is one node of the graph."""
        return m not in self._around

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[[nn.Module], Any], list[nn.Module]]:
        """Return a function that calls a model with placeholders, and the function's arguments."""
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

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self._sizes)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self._sizes)


def is_unused_size(node: fx.Node) -> bool:
    """Return whether a node is an unused query of the number of samples."""
    return node.op == "call_method" and node.target == "size" and not node.users


@contextmanager
def _factories_recorded() -> Iterator[None]:
    """Within the context, record a factory call if one of the arguments is a proxy."""
    originals = {name: getattr(torch, name) for name in _FACTORIES}

    def recorded(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, fx.Proxy):
                return leaf.tracer.create_proxy("call_function", original, args, kwargs)
        return original(*args, **kwargs)

    try:
        for name, original in originals.items():
            setattr(torch, name, partial(recorded, original))
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)
