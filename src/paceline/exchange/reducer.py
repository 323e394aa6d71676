"""What DistributedDataParallel asks of its reducer, for gradients that go another way than buckets.

DistributedDataParallel in Python runs the module, sends buffers, moves inputs and counts who has
joined; all that concerns gradients it asks of `self.reducer`. `Reducer` answers with an `Exchange`.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from paceline.core.errors import InvalidInput, StepDiscarded
from paceline.core.plan import Kind
from paceline.exchange.agreement import Named, agreed_order, check_exchangeable
from paceline.exchange.layout import Chunk, Layout, Slot
from paceline.exchange.method import Exchange
from paceline.exchange.readiness import Readiness
from paceline.exchange.replica import NONE, Statistics
from paceline.exchange.sparse import SparseGradients
from paceline.links.group import Group
from paceline.record.recorder import Recorder
from paceline.tune.chunk import ChunkTuner

_numbers = itertools.count()  # rank 0's tell models apart

# What DistributedDataParallel says, too.
UNFINISHED = "Expected to have finished reduction in the prior iteration before starting a new one"
_MOST_NAMED = 32


class Unfinished(InvalidInput, RuntimeError):
    """Some parameter got no gradient: DistributedDataParallel raises RuntimeError for it."""


class Reducer:
    """Exchanges the gradients of `parameters` while backward goes on; has DDP's reducer's methods.

    The first backward pass is exchanged as a whole, after it is over, and shows in which order
    gradients become ready: rank 0's order is that of all. `chunk` is a number of layers, or a tuner
    that looks for it while training goes on: rank 0's times decide. `sparse` are the indices of
    parameters whose gradients are sparse. Unless `find_unused_parameters`, a forward pass raises
    Unfinished after a backward pass in which some parameter got no gradient.

    `open` is called by all ranks together; without, the first exchange does it. `on_exchanged` is
    called after each exchange.
    """

    def __init__(
        self,
        parameters: Sequence[Named],
        make: Callable[[Group], Exchange],
        join: Callable[[], Group],
        chunk: int | ChunkTuner,
        *,
        sparse: Sequence[int] = (),
        find_unused_parameters: bool = False,
        on_exchanged: Callable[[], None] | None = None,
    ) -> None:
        self._named, self._sparse_indices = list(parameters), list(sparse)
        self._make, self._join = make, join
        self.tuner = self._tuner = None if isinstance(chunk, int) else chunk
        self._chunk = chunk if isinstance(chunk, int) else chunk.chunk
        self._may_be_unused = find_unused_parameters
        self._on_exchanged = on_exchanged
        self._group: Group | None = None
        self._exchange: Exchange | None = None
        self._sparse: SparseGradients | None = None
        self._recorder: Recorder | None = None
        self._number = -1
        self._layout: Layout | None = None
        self._is_arranged = False
        self._chunks: tuple[Chunk, ...] = ()
        self._handed: list[tuple[Slot, Tensor | None, int | None]] = []
        self._step_end: float | None = None
        self._until_agreed = 0 if self._tuner is None else self._tuner.interval
        self._began_phase = False
        self._joined: Any = None
        self._futures: list[Any] = []
        self._readiness = Readiness(
            [(one.name, one.parameter) for one in parameters],
            self,
            sparse=sparse,
            undefined_is_zero=not find_unused_parameters,
        )

    def open(self) -> None:
        """Join the other ranks and get what the exchange needs. InvalidInput on all, if on any."""
        group = self._group = self._join()
        self._number = group.gather(next(_numbers))[0]
        skipped = set(self._sparse_indices)
        dense = [index for index in range(len(self._named)) if index not in skipped]
        check_exchangeable([self._named[index] for index in dense], group.device)
        self._exchange = self._make(group)
        self._exchange.recorder = self._recorder
        self._sparse = SparseGradients(
            [(index, self._named[index].parameter) for index in self._sparse_indices], group
        )
        # gradients become ready in about the reverse of this order; the first pass tells
        self._layout = Layout.of(self._named, dense[::-1])
        if dense:
            self._exchange.open(self._layout)

    # What DistributedDataParallel asks.

    def forwarded(self, outputs: Sequence[Tensor], synchronize: bool) -> None:
        """Note a forward pass that can be differentiated."""
        self._readiness.forwarded(outputs, synchronize)

    def prepare_for_forward(self) -> None:
        """Nothing has to be prepared: `_rebuild_buckets` is always called, too."""

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Exchange the gradients of the next backward pass: tools ask for it after forward, too.

        Which parameters are unused shows at the end of backward.
        """
        self._readiness.ask()

    def _rebuild_buckets(self) -> bool:
        """Begin a forward pass: check how the last backward pass ended. There are no buckets."""
        if self._readiness.interrupted:
            self._discard()
        self._check_reducer_finalized()
        return False

    def _check_reducer_finalized(self) -> None:
        came = self._readiness.came
        if self._may_be_unused or all(came) or not any(came) or self._readiness.began:
            return
        missing = [
            index
            for index, one in enumerate(self._named)
            if not came[index] and one.parameter.requires_grad
        ]
        if not missing:
            return
        named = missing[:_MOST_NAMED]
        names = ", ".join(self._named[index].name for index in named)
        rank = self._group.rank if self._group else 0
        raise Unfinished(
            f"{UNFINISHED}, because some parameters were not used in producing loss. Detect them "
            "by passing the keyword argument `find_unused_parameters=True`, make sure that all "
            "`forward` function outputs participate in calculating loss, or freeze them. "
            f"{len(missing)} parameters did not receive grad for rank {rank}: {names}"
            f"{', ...' if len(missing) > len(named) else ''} (indices {named})"
        )

    def _set_static_graph(self) -> None:
        if self._is_arranged:
            raise RuntimeError("_set_static_graph() should be called before training loop starts")
        self._may_be_unused = True

    def _delay_all_reduce(self) -> None:
        """Do nothing: the first exchange is always made after its backward pass."""

    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        self._joined = None if use_static_world_size else work

    def _push_all_rebuilt_params(self) -> None:
        """There are no buckets to be rebuilt."""

    def _remove_autograd_hooks(self) -> None:
        self._readiness.close()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Nothing is sampled: `statistics` counts every step."""

    def _install_post_backward_futures(self, futures: Sequence[Any]) -> None:
        self._futures = list(futures)

    # What a replica asks.

    @property
    def pending(self) -> bool:
        """Whether a forward pass still waits for its backward pass."""
        return self._readiness.pending

    def record(self, recorder: Recorder | None) -> None:
        """Tell the recorder of all exchanges from now on; None ends that."""
        self._recorder = recorder
        if self._exchange is not None:
            self._exchange.recorder = recorder

    def statistics(self) -> Statistics:
        """Return what exchanging has taken so far."""
        return self._exchange.statistics() if self._exchange else NONE

    def close(self) -> None:
        """Remove all hooks and give back what the exchange holds."""
        self._readiness.close()
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = None

    def shadow(self) -> None:
        """Take part in an exchange, with no gradients: this rank has no more samples."""
        with self._set_aside():
            if self._is_arranged:
                self._opened().begin()
            self.ended(range(len(self._chunks)))

    @contextmanager
    def _set_aside(self) -> Iterator[None]:
        kept = [one.parameter.grad for one in self._named]
        touched, self._readiness.touched = self._readiness.touched, [False] * len(kept)
        for one in self._named:
            one.parameter.grad = None
        try:
            yield
        finally:
            self._readiness.touched = touched
            for one, gradient in zip(self._named, kept, strict=True):
                one.parameter.grad = gradient

    # What Readiness tells.

    def approaching(self) -> None:
        """Begin the phase of backward, in a loop that is not ours."""
        if self._recorder is not None and self._recorder.idle:
            self._recorder.begin_phase(Kind.BACKWARD)
            self._began_phase = True

    def began(self) -> None:
        """Begin a step: the first gradient of a backward pass is ready."""
        if self._is_arranged:
            self._opened().begin()

    def ready(self, chunk: int) -> None:
        """Hand a chunk over: all its gradients are ready."""
        exchange = self._opened()
        for slot in self._chunks[chunk].slots if exchange.chunked else ():
            gradient = slot.parameter.grad
            # Views of one tensor, such as a flat buffer of the caller's, share a version.
            is_shared = gradient is None or gradient._is_view()
            version = None if is_shared or gradient is None else gradient._version
            self._handed.append((slot, gradient, version))
        exchange.ready(self._chunks[chunk], self._readiness.touched)

    def ended(self, missing: Sequence[int]) -> None:
        """Exchange what is missing, and wait for all."""
        if self._began_phase and self._recorder is not None:
            self._recorder.end_phase()
            self._began_phase = False
        if not self._is_arranged:
            self._agree()
            self._opened().begin()
            missing = range(len(self._chunks))
        taken = self._readiness.taken_away()
        for number in missing:
            self.ready(number)
        changed = self._changed_too_late() if taken is None else self._named[taken].name
        try:
            found = self._opened().finish(self._readiness.touched) if self._chunks else ()
        except StepDiscarded:
            self._forget_gradients()
            raise
        if changed is not None:
            raise InvalidInput(
                f"parameter {changed!r}: its gradient was changed or taken away by a hook after it "
                "had been handed over; change gradients in tensor hooks, or after backward"
            )
        assert self._sparse is not None
        self._sparse.exchange(self._readiness.touched)
        self._divide_by_those_left(found)
        self._take_buffers()
        if self._tuner is not None:
            self._tune(self._tuner)
        if self._on_exchanged is not None:
            self._on_exchanged()

    def _opened(self) -> Exchange:
        assert self._exchange is not None
        return self._exchange

    def _changed_too_late(self) -> str | None:
        """Name a parameter with whose gradient a hook of the user's has done something of its own.

        The hooks of a parameter run in the order of their registration: some before ours, and some
        after it.
        """
        handed, self._handed = self._handed, []
        for slot, gradient, version in handed:
            if gradient is not slot.parameter.grad:
                return slot.name
            if version is not None and gradient is not None and gradient._version != version:
                return slot.name
        return None

    def _divide_by_those_left(self, changed: Sequence[bool]) -> None:
        """Make sums over all ranks the mean over those that have samples left."""
        work, self._joined = self._joined, None
        if work is None or self._group is None:
            return
        work.wait()
        scale = self._group.world_size / float(work.result()[0].item())
        for index, one in enumerate(self._named):
            gradient = one.parameter.grad
            if gradient is not None and (not changed or changed[index]):
                gradient.mul_(scale)

    def _take_buffers(self) -> None:
        """Wait for what a hook of the user's does with the module's buffers."""
        for future in self._futures:
            future.wait()
        self._futures = []

    def _agreed_order(self, own: Sequence[int] | None) -> list[int] | None:
        assert self._group is not None
        return agreed_order(own, len(self._named), self._group, self._number)

    def _agree(self) -> None:
        if self._exchange is None:
            self.open()
        order = self._agreed_order(self._readiness.order)
        if order is None:
            self._forget_gradients()
            raise StepDiscarded(
                "the first backward pass failed on another rank: its gradients are discarded on all"
            )
        skipped = set(self._sparse_indices)
        self._layout = Layout.of(self._named, [index for index in order if index not in skipped])
        self._is_arranged = True
        self._set_chunk(self._chunk)

    def _set_chunk(self, size: int) -> None:
        assert self._layout is not None
        self._chunk = size
        whole = (Chunk(0, self._layout.slots),) if self._layout.slots else ()
        self._chunks = self._layout.chunks(size) if self._opened().chunked and whole else whole
        chunk_of: list[int | None] = [None] * len(self._named)
        for chunk in self._chunks:
            for slot in chunk.slots:
                chunk_of[slot.index] = chunk.number
        if self._chunks:
            self._opened().arrange(self._layout, self._chunks)
        self._readiness.expect(chunk_of)

    def _tune(self, tuner: ChunkTuner) -> None:
        assert self._group is not None
        now, before = time.monotonic(), self._step_end
        self._step_end = now
        if before is None:
            return
        if self._group.rank == 0:
            tuner.record(now - before, self._opened().times())
        self._until_agreed -= 1
        if self._until_agreed == 0:
            rows = self._group.gather([tuner.chunk, tuner.done, tuner.interval])
            agreed, done, self._until_agreed = rows[0]
            if agreed != self._chunk:
                self._set_chunk(agreed)
            if done:
                self._tuner = None
            self._step_end = time.monotonic()

    def _discard(self) -> None:
        began = self._readiness.began
        self._readiness.clear()
        self._readiness.exchanged()
        self._readiness.came = [False] * len(self._named)
        self._handed = []
        self._forget_gradients()
        if not self._is_arranged:
            self._agreed_order(None)
        else:
            if not began:  # it failed before the first gradient
                self._opened().begin()
            self._opened().discard()

    def _forget_gradients(self) -> None:
        """Keep gradients of this rank alone from updating what all have in common."""
        for one in self._named:
            one.parameter.grad = None
