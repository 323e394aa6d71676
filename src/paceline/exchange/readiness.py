"""Detect by autograd hooks when gradients are ready, and when a backward pass ends.

Autograd calls a parameter's hook when its gradient is complete: once per backward pass, even if
layers share the parameter. But for a parameter that is used in two re-entrant checkpoints, autograd
calls the hook twice, and only the second call finds the complete gradient. So `Readiness` counts
each hook's calls in the first backward pass. Later, a gradient is ready after as many calls.

Each run of autograd's engine (a graph task) calls callbacks at its end. A backward pass ends with
the callbacks of the graph task that reaches the module's outputs. A re-entrant checkpoint runs a
nested graph task, whose callbacks would be too early.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from paceline.core.errors import InvalidInput
from paceline.exchange.layout import NamedParameter


class Listener:
    """Callbacks that `Readiness` calls during a backward pass; by default they do nothing."""

    def approaching(self) -> None:
        """React when backward reaches the module's outputs, before any gradient is ready."""

    def began(self) -> None:
        """React when the first gradient of a backward pass is ready."""

    def ready(self, chunk: int) -> None:
        """React when all gradients of chunk number `chunk` are ready."""

    def ended(self, missing: Sequence[int]) -> None:
        """Handle the end of a backward pass; `missing`: chunks without all their gradients."""


class Readiness:
    """Watches when gradients become ready, and calls the methods of `listener`.

    As in DistributedDataParallel, a backward pass exchanges gradients if a forward pass has
    requested an exchange since the last exchange. A second backward pass through the same outputs
    exchanges gradients again. Any other backward pass only accumulates gradients.

    `sparse`: indices of parameters that may have sparse gradients. `undefined_is_zero`: whether a
    gradient that autograd leaves undefined counts as changed, as if it were zero.

    Attributes: `touched`: by parameter, whether its gradient changed since the last exchange.
    `came`: by parameter, whether its gradient became ready since the last forward pass. `order`:
    parameters' indices in the order of ready gradients, recorded until `expect` is called. `began`:
    whether any gradient became ready in this backward pass. `pending`: whether a requested exchange
    has not ended yet. Hooks hold weak references to this object and the listener.
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
        # by parameter: how often a backward pass calls its hook, counted in the first pass
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
        """Raise InvalidInput if a parameter has lost its hook, because its tensor was replaced."""
        for one, tensor in zip(self._named, self._tensors, strict=True):
            if one.parameter._cdata != tensor:
                raise InvalidInput(
                    f"parameter {one.name!r}",
                    "has a new C++ tensor, which lacks the hook that Paceline registered",
                    hint="load or move the module before wrapping it, or call "
                    "torch.__future__.set_swap_module_params_on_conversion(False)",
                )

    @property
    def interrupted(self) -> bool:
        """Whether the last backward pass raised an error: it began, but did not end."""
        return self._armed and not in_backward()

    def forwarded(self, outputs: Iterable[Tensor], synchronize: bool) -> None:
        """Record a forward pass; `synchronize`: whether its backward pass exchanges gradients."""
        if not synchronize:
            return
        self.request()
        reached = weakly(self.reached)
        for output in outputs:
            # no hooks on leaf tensors: they belong to the caller, and would keep the hook forever
            if output.requires_grad and output.grad_fn is not None:
                output.register_hook(reached)

    def request(self) -> None:
        """Request that the next backward pass exchanges gradients."""
        self.pending = True
        if not in_backward():
            self.came = [False] * len(self.came)

    def expect(self, chunk_of: Sequence[int | None]) -> None:
        """Report ready chunks from now on; `chunk_of`: chunk number of each parameter, or None."""
        self._chunk_of = list(chunk_of)
        sizes = Counter(chunk for chunk in chunk_of if chunk is not None)
        self._whole = [sizes[chunk] for chunk in range(len(sizes))]

    def exchanged(self) -> None:
        """Mark all gradients as unchanged, and the requested exchange as ended."""
        self.touched = [False] * len(self.touched)
        self._undefined.clear()
        self.pending = False

    def removed_gradient(self) -> int | None:
        """Return the index of a parameter whose `grad` was set to None after it was ready.

        Returns None if there is no such parameter. Also marks as unchanged the gradients
        that were set to None before this backward pass.
        """
        for index, one in enumerate(self._named):
            if one.parameter.grad is None and self.touched[index] and index not in self._undefined:
                if self._fired[index]:
                    return index
                self.touched[index] = False
        return None

    def clear(self) -> None:
        """Reset the state of the backward pass, after it has ended or failed."""
        self._armed = self.began = False
        self._fired = [0] * len(self._fired)
        self.order = []

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def fired(self, index: int, parameter: Tensor) -> None:
        """Record that autograd has accumulated the gradient of parameter number `index`."""
        defined = self._check(index, parameter)
        # mark as changed even within no_sync(): the next exchange sends accumulated gradients
        self.touched[index] |= defined or self._undefined_is_zero
        if not defined:
            self._undefined.add(index)
        if not self.pending:
            return
        self.came[index] = True
        if not self._armed:
            self._arm()
        if not self.began:
            # call the listener's `began` before `_count`, which may call its `ready`
            self.began = True
            self._left = self._whole.copy()
            self._alive_listener.began()
        self._count(index)

    def reached(self, gradient: Tensor) -> None:
        """Begin to watch a backward pass; hook of the module's outputs."""
        if not self._armed and self._handles:
            self.pending = True
            self._arm()
            self._alive_listener.approaching()

    @property
    def _alive_listener(self) -> Listener:
        listener = self._listener()
        assert listener is not None  # alive, because the listener owns this object
        return listener

    def _arm(self) -> None:
        self._armed = True
        # autograd runs queued callbacks at the end of the current graph task
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
        # The chunk was complete before this call, so it may have been sent without this gradient.
        if surplus > 0 and self._left[chunk] == 0:
            problem = "got another gradient after its gradient was sent"
            hint = "use each parameter as often in every step as in the first step"
            raise self._refusal(index, problem, hint)
        if surplus == 0:
            self._left[chunk] -= 1
            if self._left[chunk] == 0:
                self._alive_listener.ready(chunk)

    def _ended(self) -> None:
        if not self.began:  # this backward pass has reached no parameter
            self.clear()
            return
        if self._chunk_of is None:
            self._expected = [max(1, count) for count in self._fired]
        missing = [chunk for chunk, left in enumerate(self._left) if left]
        # reset the state for the next backward pass even if the listener's `ended` raises
        try:
            self._alive_listener.ended(missing)
        finally:
            self.exchanged()
            self.clear()

    def _check(self, index: int, parameter: Tensor) -> bool:
        """Return whether a parameter has a gradient; check that no hook has removed it."""
        gradient = parameter.grad
        if gradient is None:
            if len(parameter._post_accumulate_grad_hooks) > 1:
                problem = "has a gradient that another hook set to None before it was sent"
                raise self._refusal(index, problem, "update parameters after backward")
            return False
        if gradient.layout != torch.strided and index not in self._sparse:
            problem = "has a sparse gradient, but is not the weight of an nn.Embedding(Bag)"
            raise self._refusal(index, problem, "use sparse=False")
        return True

    def _refusal(self, index: int, problem: str, hint: str) -> InvalidInput:
        return InvalidInput(f"parameter {self._named[index].name!r}", problem, hint=hint)


def weakly(method: Any, *first: Any) -> Callable[..., Any]:
    """Return a function that calls `method(*first, ...)` until the method's object is deleted."""
    alive = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = alive()
        return None if bound is None else bound(*first, *args)

    return call


def in_backward() -> bool:
    """Return whether autograd runs a backward pass in this thread."""
    task: int = torch._C._current_graph_task_id()
    return task != -1
