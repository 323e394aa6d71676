"""Readiness of gradients, and the end of a backward pass.

Autograd calls a hook each time that it has accumulated a gradient. The first backward pass shows
how often it does so for each parameter: one that several layers share, or a cell that runs many
times, fires once, but one that lies in two re-entrant checkpoints fires twice, and only then is its
gradient complete.

A backward pass is over when autograd runs the callbacks of the graph task that began it. That is
the one that reaches the module's outputs: the first gradient may become ready in a task nested in
it, as in a re-entrant checkpoint, whose callbacks run too early.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from paceline.core.errors import InvalidInput
from paceline.exchange.layout import NamedParameter


class Listener:
    """Callbacks of a backward pass, which do nothing unless they are overridden."""

    def approaching(self) -> None:
        """Begin a backward pass: it has reached the outputs, and no parameter yet."""

    def began(self) -> None:
        """Begin a step: the first gradient of a backward pass is ready."""

    def ready(self, chunk: int) -> None:
        """Take a chunk whose gradients are all ready."""

    def ended(self, missing: Sequence[int]) -> None:
        """End a backward pass; the chunks `missing` lack some of their gradients."""


class Readiness:
    """Watches the gradients of `parameters`, and calls `listener`.

    Gradients are exchanged, and not only accumulated, if a forward pass has asked for it since the
    last exchange, as with DistributedDataParallel; or if a backward pass reaches the outputs of
    such a forward pass once more. `touched`: the gradients that have changed since the last
    exchange. `order`: the order of readiness in a backward pass before `expect`. `came`: the
    gradients that became ready since the last forward pass. `began`: True if one did in this pass.
    `pending`: True if a forward pass has asked for an exchange that has not been made yet.

    The hooks hold neither this object nor the listener, so that both end with their owner.
    """

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        listener: Listener,
        *,
        sparse: Iterable[int] = (),
        undefined_is_zero: bool = True,
    ) -> None:
        self._named = list(parameters)
        self._listener = weakref.ref(listener)
        self._sparse = frozenset(sparse)
        self._undefined_is_zero = undefined_is_zero
        self.pending = False
        self.touched = [False] * len(parameters)
        self._undefined: set[int] = set()
        self.came = [False] * len(parameters)
        self.order: list[int] = []
        self._armed = False
        self.began = False
        self._fired = [0] * len(parameters)
        # Accumulations of each gradient in a backward pass, as the first pass has counted them.
        self._expected = [1] * len(parameters)
        self._chunk_of: list[int | None] | None = None
        self._left: list[int] = []
        self._whole: list[int] = []
        self._tensors = [one.parameter._cdata for one in parameters]
        self._handles: list[RemovableHandle] = [
            one.parameter.register_post_accumulate_grad_hook(weakly(self.fired, index))
            for index, one in enumerate(parameters)
        ]

    def check_attached(self) -> None:
        """Raise InvalidInput if a parameter has lost its hook, which torch keeps in C++.

        DistributedDataParallel, which holds on to that, makes loading a state fail then.
        """
        for one, tensor in zip(self._named, self._tensors, strict=True):
            if one.parameter._cdata != tensor:
                raise InvalidInput(
                    f"parameter {one.name!r}",
                    "its tensor was swapped for another after the module was made parallel, as "
                    "torch.__future__.set_swap_module_params_on_conversion() has it done",
                    hint="load states and move modules before, or without that",
                )

    @property
    def interrupted(self) -> bool:
        """True if a backward pass began and never ended: it has failed."""
        return self._armed and not in_backward()

    def forwarded(self, outputs: Iterable[Tensor], synchronize: bool) -> None:
        """Record a forward pass; with `synchronize`, its gradients are to be exchanged."""
        if not synchronize:
            return
        self.ask()
        reached = weakly(self.reached)
        for output in outputs:
            # A leaf belongs to the caller and outlives the pass: it would keep the hook.
            if output.requires_grad and output.grad_fn is not None:
                output.register_hook(reached)

    def ask(self) -> None:
        """Request an exchange of the next backward pass's gradients."""
        self.pending = True
        if not in_backward():
            self.came = [False] * len(self.came)

    def expect(self, chunk_of: Sequence[int | None]) -> None:
        """Report chunks from now on; `chunk_of` has the chunk of each parameter, or None."""
        self._chunk_of = list(chunk_of)
        known = [chunk for chunk in chunk_of if chunk is not None]
        self._whole = [0] * (max(known, default=-1) + 1)
        for chunk in known:
            self._whole[chunk] += 1

    def exchanged(self) -> None:
        """Forget which gradients have changed: they are exchanged."""
        self.touched = [False] * len(self.touched)
        self._undefined.clear()
        self.pending = False

    def removed_gradient(self) -> int | None:
        """Return a parameter whose gradient was removed since it became ready, if there is one.

        A gradient of an earlier backward pass that the caller has cleared counts as unchanged.
        """
        for index, one in enumerate(self._named):
            if one.parameter.grad is None and self.touched[index] and index not in self._undefined:
                if self._fired[index]:
                    return index
                self.touched[index] = False
        return None

    def clear(self) -> None:
        """Forget the backward pass that is over or has failed."""
        self._armed = self.began = False
        self._fired = [0] * len(self._fired)
        self.order = []

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def fired(self, index: int, parameter: Tensor) -> None:
        """Record that autograd has accumulated a parameter's gradient."""
        defined = self._check(index, parameter)
        # Without an exchange, too: under no_sync gradients accumulate for a later one.
        self.touched[index] |= defined or self._undefined_is_zero
        if not defined:
            self._undefined.add(index)
        if not self.pending:
            return
        self.came[index] = True
        if not self._armed:
            self._arm()
        if not self.began:
            # Before counting: this gradient may complete a chunk.
            self.began = True
            self._left = self._whole.copy()
            self._alive_listener.began()
        self._count(index)

    def reached(self, gradient: Tensor) -> None:
        """Record that a backward pass has reached outputs whose gradients are exchanged."""
        if not self._armed and self._handles:
            self.pending = True
            self._arm()
            self._alive_listener.approaching()

    @property
    def _alive_listener(self) -> Listener:
        listener = self._listener()
        assert listener is not None  # it owns this object
        return listener

    def _arm(self) -> None:
        self._armed = True
        # The callback belongs to the graph task that runs now, and so to its end.
        Variable._execution_engine.queue_callback(self._ended)

    def _count(self, index: int) -> None:
        self._fired[index] += 1
        if self._chunk_of is None:
            if self._fired[index] == 1:
                self.order.append(index)
            return
        chunk, surplus = self._chunk_of[index], self._fired[index] - self._expected[index]
        if chunk is None:
            return
        # The chunk may already be on its way, read by other threads: too late for a correction.
        if surplus > 0 and self._left[chunk] == 0:
            raise InvalidInput(
                f"parameter {self._named[index].name!r}",
                f"got a gradient once more after its chunk was sent ({self._expected[index]} in "
                "the first backward pass)",
                hint=(
                    "a module whose graph changes so from step to step cannot be exchanged chunk "
                    "by chunk"
                ),
            )
        if surplus == 0:
            self._left[chunk] -= 1
            if self._left[chunk] == 0:
                self._alive_listener.ready(chunk)

    def _ended(self) -> None:
        if not self.began:  # no parameter of this module got a gradient
            self.clear()
            return
        if self._chunk_of is None:
            self._expected = [max(1, count) for count in self._fired]
        missing = [chunk for chunk, left in enumerate(self._left) if left]
        # Whatever `ended` raises, the next backward pass must not find a step half done.
        try:
            self._alive_listener.ended(missing)
        finally:
            self.exchanged()
            self.clear()

    def _check(self, index: int, parameter: Tensor) -> bool:
        """Return True if there is a gradient: a function may return none for its weights."""
        gradient = parameter.grad
        if gradient is None:
            if len(parameter._post_accumulate_grad_hooks) > 1:
                raise InvalidInput(
                    f"parameter {self._named[index].name!r}",
                    "its gradient was taken away by another hook before it could be exchanged",
                    hint="update parameters after backward, not in hooks",
                )
            return False
        if gradient.layout != torch.strided and index not in self._sparse:
            raise InvalidInput(
                f"parameter {self._named[index].name!r}",
                "its gradient is sparse, which only those of nn.Embedding and nn.EmbeddingBag may "
                "be",
                hint="use sparse=False",
            )
        return True


def weakly(method: Any, *first: Any) -> Callable[..., Any]:
    """Return a function that calls a bound method, and does nothing when its object is gone."""
    alive, function = weakref.ref(method.__self__), method.__func__

    def call(*args: Any) -> Any:
        owner = alive()
        return None if owner is None else function(owner, *first, *args)

    return call


def in_backward() -> bool:
    """Return True if this thread runs inside a backward pass."""
    task: int = torch._C._current_graph_task_id()
    return task != -1
