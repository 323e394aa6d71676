"""Which gradients are ready, and when a backward pass is over.

Autograd calls a hook each time that it has accumulated a gradient. How often it does so in one
backward pass is found out in the first: a parameter that several layers share, or a cell that runs
many times, fires once, but one that lies in two re-entrant checkpoints fires twice, and only then
is its gradient complete.

A backward pass is over when autograd runs the callbacks of the graph task that began it. That is
the one which reaches the module's outputs, because gradients may first become ready in a task
nested in it.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from paceline.core.errors import InvalidInput


class Listener(Protocol):
    """Who is told."""

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

    With `paused` gradients only accumulate. `touched` says which have changed since the last
    exchange, `order` in which order they became ready in the first backward pass, and `began`
    whether one has in this pass.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], listener: Listener) -> None:
        self._names = [name for name, _ in parameters]
        self._listener = listener
        self.paused = False
        self.touched = [False] * len(parameters)
        self.order: list[int] = []
        self._armed = False
        self.began = False
        self._fired = [0] * len(parameters)
        self._expected = [1] * len(parameters)
        self._chunk_of: list[int] | None = None
        self._left: list[int] = []
        self._whole: list[int] = []
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))
            for index, (_, parameter) in enumerate(parameters)
        ]

    @property
    def interrupted(self) -> bool:
        """Whether a backward pass began and never ended: it has failed."""
        return self._armed and not in_backward()

    def watch(self, outputs: Any) -> None:
        """Have the backward pass that reaches these outputs be the one whose end counts."""
        leaves = [outputs] if isinstance(outputs, Tensor) else tree_leaves(outputs)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._reached)

    def expect(self, chunk_of: Sequence[int]) -> None:
        """Tell of chunks from now on; `chunk_of` gives that of each parameter."""
        self._chunk_of = list(chunk_of)
        self._whole = [0] * (max(chunk_of) + 1)
        for chunk in chunk_of:
            self._whole[chunk] += 1

    def clear(self) -> None:
        """Forget the backward pass that is over or has failed."""
        self._armed = self.began = False
        self._fired = [0] * len(self._fired)

    def close(self) -> None:
        """Remove all hooks."""
        handles: list[RemovableHandle] = self._handles
        for handle in handles:
            handle.remove()
        self._handles = []

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def fired(parameter: Tensor) -> None:
            self._check(index, parameter.grad)
            self.touched[index] = True
            if self.paused:
                return
            if not self._armed:
                self._arm()
            if not self.began:
                self._begin()
            self._count(index)

        return fired

    def _reached(self, gradient: Tensor) -> None:
        if not self.paused and not self._armed and self._handles:
            self._arm()
            self._listener.approaching()

    def _arm(self) -> None:
        self._armed = True
        Variable._execution_engine.queue_callback(self._ended)

    def _begin(self) -> None:
        self.began = True
        self._left = self._whole.copy()
        self._listener.began()

    def _count(self, index: int) -> None:
        self._fired[index] += 1
        if self._chunk_of is None:
            if self._fired[index] == 1:
                self.order.append(index)
            return
        chunk, surplus = self._chunk_of[index], self._fired[index] - self._expected[index]
        if surplus > 0 and self._left[chunk] == 0:
            raise InvalidInput(
                f"parameter {self._names[index]!r}: got a gradient once more after its chunk was "
                f"sent ({self._expected[index]} in the first backward pass); a module whose graph "
                "changes so from step to step cannot be exchanged chunk by chunk"
            )
        if surplus == 0:
            self._left[chunk] -= 1
            if self._left[chunk] == 0:
                self._listener.ready(chunk)

    def _ended(self) -> None:
        if not self.began:  # of this module nothing was differentiated
            self.clear()
            return
        if self._chunk_of is None:
            self._expected = [max(1, count) for count in self._fired]
        missing = [chunk for chunk, left in enumerate(self._left) if left]
        try:
            self._listener.ended(missing)
        finally:
            self.touched = [False] * len(self.touched)
            self.clear()

    def _check(self, index: int, gradient: Tensor | None) -> None:
        if gradient is None:
            raise InvalidInput(
                f"parameter {self._names[index]!r}: its gradient was taken away by another hook "
                "before it could be exchanged; update parameters after backward, not in hooks"
            )
        if gradient.layout != torch.strided:
            raise InvalidInput(
                f"parameter {self._names[index]!r}: its gradient is sparse, which cannot be "
                "exchanged; use sparse=False"
            )


def in_backward() -> bool:
    """Whether this thread runs inside a backward pass."""
    task: int = torch._C._current_graph_task_id()
    return task != -1
