"""Which gradients are ready, and when a backward pass is over.

Autograd calls a hook each time that it has accumulated a gradient. How often it does so in one
backward pass is found out in the first: a parameter that several layers share, or a cell that runs
many times, fires once, but one that lies in two re-entrant checkpoints fires twice, and only then
is its gradient complete.

A backward pass is over when autograd runs the callbacks of the graph task that began it. That is
the one which reaches the module's outputs, because gradients may first become ready in a task
nested in it.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from paceline.core.errors import InvalidInput


class Listener(Protocol):
    """Callbacks of a backward pass."""

    def approaching(self) -> None:
        """Note that a backward pass has reached the outputs, and no parameter yet."""
        ...

    def began(self) -> None:
        """Note that the first gradient of a backward pass is ready."""
        ...

    def ready(self, chunk: int) -> None:
        """Note that all gradients of a chunk are ready."""
        ...

    def ended(self, missing: Sequence[int]) -> None:
        """Note that backward is over; some gradients of the chunks `missing` did not come."""
        ...


class Readiness:
    """Watches the gradients of `parameters` (names and tensors); tells `listener`.

    Gradients are exchanged, and not only accumulated, if a forward pass has asked for it since the
    last exchange, as with DistributedDataParallel; or if a backward pass reaches, once more, the
    outputs of one that did. `touched` says which gradients have changed since the last exchange,
    `order` in which order they have become ready in a backward pass before `expect`, `came` which
    have become ready since the last forward pass, and `began` whether one has in this pass.

    The hooks hold neither this object nor the listener, so that both end with their owner.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        listener: Listener,
        *,
        sparse: Iterable[int] = (),
        undefined_is_zero: bool = True,
    ) -> None:
        self._names = [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._listener = weakref.ref(listener)
        self._sparse = frozenset(sparse)
        self._undefined_is_zero = undefined_is_zero
        self._asked = False
        self.touched = [False] * len(parameters)
        self._undefined: set[int] = set()
        self.came = [False] * len(parameters)
        self.order: list[int] = []
        self._armed = False
        self.began = False
        self._fired = [0] * len(parameters)
        self._expected = [1] * len(parameters)
        self._chunk_of: list[int | None] | None = None
        self._left: list[int] = []
        self._whole: list[int] = []
        hook = _weakly(self)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(hook(index))
            for index, (_, parameter) in enumerate(parameters)
        ]

    @property
    def interrupted(self) -> bool:
        """Whether a backward pass began and never ended: it has failed."""
        return self._armed and not in_backward()

    @property
    def pending(self) -> bool:
        """Whether a forward pass has asked for an exchange that has not been made yet."""
        return self._asked

    def forwarded(self, outputs: Iterable[Tensor], synchronize: bool) -> None:
        """Note a forward pass with its outputs, and whether its gradients are to be exchanged."""
        if not synchronize:
            return
        self.ask()
        reached = _reached_weakly(self)
        for output in outputs:
            # A leaf is the caller's own: it would keep the hook for good.
            if output.requires_grad and output.grad_fn is not None:
                output.register_hook(reached)

    def ask(self) -> None:
        """Have the gradients of the next backward pass exchanged."""
        self._asked = True
        if not in_backward():
            self.came = [False] * len(self.came)

    def expect(self, chunk_of: Sequence[int | None]) -> None:
        """Tell of chunks from now on; `chunk_of` gives that of each parameter that is in one."""
        self._chunk_of = list(chunk_of)
        known = [chunk for chunk in chunk_of if chunk is not None]
        self._whole = [0] * (max(known, default=-1) + 1)
        for chunk in known:
            self._whole[chunk] += 1

    def exchanged(self) -> None:
        """Note that all gradients that have changed are exchanged."""
        self.touched = [False] * len(self.touched)
        self._undefined.clear()
        self._asked = False

    def taken_away(self) -> int | None:
        """Return a parameter whose gradient somebody has taken since it became ready.

        What the caller has cleared since an earlier backward pass has not changed any more.
        """
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is None and self.touched[index] and index not in self._undefined:
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
        handles: list[RemovableHandle] = self._handles
        for handle in handles:
            handle.remove()
        self._handles = []

    def fired(self, index: int, parameter: Tensor) -> None:
        """Take in that autograd has accumulated a parameter's gradient."""
        defined = self._check(index, parameter)
        self.touched[index] |= defined or self._undefined_is_zero
        if not defined:
            self._undefined.add(index)
        if not self._asked:
            return
        self.came[index] = True
        if not self._armed:
            self._arm()
        if not self.began:
            self._begin()
        self._count(index)

    def reached(self) -> None:
        """Take in that a backward pass has come to outputs whose gradients are to be exchanged."""
        if not self._armed and self._handles:
            self._asked = True
            self._arm()
            self._told.approaching()

    @property
    def _told(self) -> Listener:
        listener = self._listener()
        assert listener is not None  # it owns this object
        return listener

    def _arm(self) -> None:
        self._armed = True
        Variable._execution_engine.queue_callback(self._ended)

    def _begin(self) -> None:
        self.began = True
        self._left = self._whole.copy()
        self._told.began()

    def _count(self, index: int) -> None:
        self._fired[index] += 1
        if self._chunk_of is None:
            if self._fired[index] == 1:
                self.order.append(index)
            return
        chunk, surplus = self._chunk_of[index], self._fired[index] - self._expected[index]
        if chunk is None:
            return
        if surplus > 0 and self._left[chunk] == 0:
            raise InvalidInput(
                f"parameter {self._names[index]!r}: got a gradient once more after its chunk was "
                f"sent ({self._expected[index]} in the first backward pass); a module whose graph "
                "changes so from step to step cannot be exchanged chunk by chunk"
            )
        if surplus == 0:
            self._left[chunk] -= 1
            if self._left[chunk] == 0:
                self._told.ready(chunk)

    def _ended(self) -> None:
        if not self.began:  # of this module nothing was differentiated
            self.clear()
            return
        if self._chunk_of is None:
            self._expected = [max(1, count) for count in self._fired]
        missing = [chunk for chunk, left in enumerate(self._left) if left]
        try:
            self._told.ended(missing)
        finally:
            self.exchanged()
            self.clear()

    def _check(self, index: int, parameter: Tensor) -> bool:
        """Return whether there is a gradient: a function may return none for its weights."""
        gradient = parameter.grad
        if gradient is None:
            if len(parameter._post_accumulate_grad_hooks) > 1:
                raise InvalidInput(
                    f"parameter {self._names[index]!r}: its gradient was taken away by another "
                    "hook before it could be exchanged; update parameters after backward, not in "
                    "hooks"
                )
            return False
        if gradient.layout != torch.strided and index not in self._sparse:
            raise InvalidInput(
                f"parameter {self._names[index]!r}: its gradient is sparse, which only those of "
                "nn.Embedding and nn.EmbeddingBag may be; use sparse=False"
            )
        return True


def _weakly(readiness: Readiness) -> Callable[[int], Callable[[Tensor], None]]:
    """Return what makes hooks that tell of a parameter's gradient, as long as somebody listens."""
    alive = weakref.ref(readiness)

    def hook_of(index: int) -> Callable[[Tensor], None]:
        def fired(parameter: Tensor) -> None:
            readiness = alive()
            if readiness is not None:
                readiness.fired(index, parameter)

        return fired

    return hook_of


def _reached_weakly(readiness: Readiness) -> Callable[[Tensor], None]:
    """Return a hook of outputs that tells of a backward pass, as long as somebody listens."""
    alive = weakref.ref(readiness)

    def reached(gradient: Tensor) -> None:
        readiness = alive()
        if readiness is not None:
            readiness.reached()

    return reached


def in_backward() -> bool:
    """Whether this thread runs inside a backward pass."""
    task: int = torch._C._current_graph_task_id()
    return task != -1
