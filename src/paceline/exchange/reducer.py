"""Replace DistributedDataParallel's C++ reducer by one that averages gradients by an `Exchange`.

DistributedDataParallel's Python code still runs the module, broadcasts buffers, moves inputs to the
device and handles join(); only its `reducer` is replaced.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from paceline.core.chunks import ChunkTuner
from paceline.core.errors import InvalidInput, StepDiscarded
from paceline.core.plan import Kind
from paceline.exchange import layout
from paceline.exchange.layout import Chunk, Layout, NamedParameter, Slot
from paceline.exchange.readiness import Listener, Readiness
from paceline.exchange.replica import NONE, Exchange, Statistics
from paceline.links.group import Group
from paceline.record.recorder import Recorder

# Each reducer gets a number from rank 0. Equal numbers show that all ranks run backward on the
# same model.
_numbers = itertools.count()

# the beginning of DistributedDataParallel's message, for which programs search
UNFINISHED = "Expected to have finished reduction in the prior iteration before starting a new one"
_MOST_NAMED = 32


class Unfinished(InvalidInput, RuntimeError):
    """A parameter got no gradient; programs recognize the error by torch's type and text."""

    def __init__(self, message: str) -> None:
        RuntimeError.__init__(self, message)


class Reducer(Listener):
    """Averages gradients during backward; has the methods of DDP's C++ reducer.

    The gradients of the first backward pass are exchanged after its end. In later passes, all ranks
    exchange gradients in the order in which rank 0's gradients became ready in the first pass.
    `join()` connects the ranks; `make(group)` creates the exchange. `chunk`: number of layers that
    are exchanged together, or a tuner that chooses this number by rank 0's times; None: all layers,
    after backward. `sparse`: indices of parameters with sparse gradients. `on_exchanged` is called
    after each exchange.
    """

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        make: Callable[[Group], Exchange],
        join: Callable[[], Group],
        chunk: int | ChunkTuner | None,
        *,
        sparse: Sequence[int],
        find_unused_parameters: bool,
        on_exchanged: Callable[[], None],
    ) -> None:
        self._named, self._sparse = list(parameters), dict.fromkeys(sparse)
        self._make, self._join = make, join
        self.tuner = self._tuner = chunk if isinstance(chunk, ChunkTuner) else None
        self._chunk = chunk.chunk if isinstance(chunk, ChunkTuner) else chunk
        self._may_be_unused = find_unused_parameters
        self._on_exchanged = on_exchanged
        self._group: Group | None = None
        self._exchange: Exchange | None = None
        self._recorder: Recorder | None = None
        self._number = -1
        self._layout: Layout | None = None
        self._is_arranged = False
        self._chunks: tuple[Chunk, ...] = ()
        self._sent: list[tuple[Slot, Tensor | None, int | None]] = []
        self._step_end: float | None = None
        self._until_agreed = 0 if self._tuner is None else self._tuner.interval
        self._began_phase = False
        self._joined: Any = None
        self._futures: list[Any] = []
        self._readiness = Readiness(
            parameters, self, sparse=sparse, undefined_is_zero=not find_unused_parameters
        )
        self.forwarded = self._readiness.forwarded
        self._remove_autograd_hooks = self._readiness.close

    def open(self) -> None:
        """Connect to the other ranks, and create the exchange; collective.

        Called at the latest after the first backward pass. An error is raised on all ranks.
        """
        group = self._group = self._join()
        self._number = group.gather(next(_numbers))[0]
        dense = [index for index in range(len(self._named)) if index not in self._sparse]
        layout.check_exchangeable([self._named[index] for index in dense], group.device)
        self._exchange = self._make(group)
        self._exchange.recorder = self._recorder
        # the order of gradients is unknown before the first backward pass; assume the reverse order
        self._layout = Layout.of(self._named, dense[::-1])
        if dense:
            self._exchange.open(self._layout)

    # Methods called by DistributedDataParallel.

    def _do_nothing(self, *_: object) -> None:
        """Do nothing, because this reducer has no buckets and no C++ logger."""

    prepare_for_forward = _delay_all_reduce = _push_all_rebuilt_params = _do_nothing
    _set_ddp_runtime_logging_sample_rate = _do_nothing

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Request that the next backward pass exchanges gradients; some tools call this."""
        self._readiness.request()

    def _rebuild_buckets(self) -> bool:
        """Check how the last backward pass ended, and return False: no buckets were rebuilt.

        DDP calls this before each forward pass. Raises Unfinished if a parameter got no gradient.
        """
        if self._readiness.interrupted:
            self._discard()
        self._readiness.check_attached()
        self._check_reducer_finalized()
        return False

    def _check_reducer_finalized(self) -> None:
        came = self._readiness.came
        if self._may_be_unused or all(came) or not any(came) or self._readiness.began:
            return
        trained = [one.parameter.requires_grad for one in self._named]
        missing = [index for index, asked in enumerate(trained) if asked and not came[index]]
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

    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        self._joined = None if use_static_world_size else work

    def _install_post_backward_futures(self, futures: Sequence[Any]) -> None:
        self._futures = list(futures)

    # Methods that `Synchronized` calls.

    @property
    def pending(self) -> bool:
        """Whether a forward pass has requested an exchange that has not ended yet."""
        return self._readiness.pending

    def record(self, recorder: Recorder | None) -> None:
        """Record all exchanges from now on; None stops recording."""
        self._recorder = recorder
        if self._exchange is not None:
            self._exchange.recorder = recorder

    def state(self) -> dict[str, Tensor]:
        """Return this rank's exchange state, such as error feedback."""
        return self._exchange.state() if self._exchange else {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Load a result of `state`; `open` must be called before."""
        self._opened().load_state(state)

    @property
    def is_searched(self) -> bool:
        """Whether the search for the fastest number of layers per chunk is still running."""
        return self._tuner is not None

    def statistics(self) -> Statistics:
        """Return the traffic and time of all exchanges so far."""
        return self._exchange.statistics() if self._exchange else NONE

    def close(self) -> None:
        """Remove all hooks and free the resources of the exchange."""
        self._readiness.close()
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = None

    def shadow(self) -> None:
        """Exchange without gradients, because this rank has no samples left within DDP's join()."""
        # hide this rank's gradients, so that the exchange does not add them
        kept = [one.parameter.grad for one in self._named]
        touched, self._readiness.touched = self._readiness.touched, [False] * len(kept)
        self._forget_gradients()
        try:
            self.began()
            self.ended(range(len(self._chunks)))
        finally:
            self._readiness.touched = touched
            for one, gradient in zip(self._named, kept, strict=True):
                one.parameter.grad = gradient

    # Methods that `Readiness` calls during backward.

    def approaching(self) -> None:
        """Begin to record a backward pass, unless Paceline's training loop records it."""
        if self._recorder is not None and self._recorder.idle:
            self._recorder.begin_phase(Kind.BACKWARD)
            self._began_phase = True

    def began(self) -> None:
        """Begin an exchange, when the first gradient of a backward pass is ready."""
        # no chunks: the first backward pass, or all gradients are sparse
        if self._chunks:
            self._opened().begin()

    def ready(self, chunk: int) -> None:
        """Start to exchange chunk number `chunk`, whose gradients are ready."""
        for slot in self._chunks[chunk].slots if self._chunk is not None else ():
            gradient = slot.parameter.grad
            # A view shares its version counter with its base tensor, and thus with the other
            # gradients of a flat buffer. So store None for a view.
            version = None if gradient is None or gradient._is_view() else gradient._version
            self._sent.append((slot, gradient, version))
        self._opened().ready(self._chunks[chunk], self._readiness.touched)

    def ended(self, missing: Sequence[int]) -> None:
        """End a backward pass: exchange the `missing` chunks, and wait for all averages."""
        if self._began_phase and self._recorder is not None:
            self._recorder.end_phase()
            self._began_phase = False
        if not self._is_arranged:
            self._agree()
            self.began()
            missing = range(len(self._chunks))
        removed = self._readiness.removed_gradient()
        # exchange chunks without gradients on this rank, too, because other ranks wait for them
        for number in missing:
            self.ready(number)
        changed = self._changed_too_late() if removed is None else self._named[removed].name
        try:
            found = self._opened().finish(self._readiness.touched) if self._chunks else ()
        except StepDiscarded:
            # remove the gradients, so that no optimizer uses them without averaging
            self._forget_gradients()
            raise
        if changed is not None:
            problem = "has a gradient that a hook changed or removed after it was sent"
            hint = "change gradients by Tensor.register_hook, or after backward"
            raise InvalidInput(f"parameter {changed!r}", problem, hint=hint)
        if self._sparse:
            assert self._group is not None
            touched = [self._readiness.touched[index] for index in self._sparse]
            parameters = [self._named[index].parameter for index in self._sparse]
            layout.exchange_sparse(parameters, touched, self._group)
        self._divide_by_those_left(found)
        for future in self._futures:  # a user's communication hook may still send buffers
            future.wait()
        self._futures = []
        if self._tuner is not None:
            self._tune(self._tuner)
        self._on_exchanged()

    def _opened(self) -> Exchange:
        assert self._exchange is not None
        return self._exchange

    def _changed_too_late(self) -> str | None:
        # A user's hook may run after `Readiness`'s, and change a gradient that was already sent.
        sent, self._sent = self._sent, []
        for slot, before, version in sent:
            gradient = slot.parameter.grad
            found = None if version is None or gradient is None else gradient._version
            if gradient is not before or found != version:
                return slot.name
        return None

    def _divide_by_those_left(self, changed: Sequence[bool]) -> None:
        # The exchange has divided by the number of all ranks. But within join(), DDP averages over
        # the ranks that still have samples. `work` is DDP's all-reduce of their number.
        work, self._joined = self._joined, None
        if work is None or self._group is None:
            return
        work.wait()
        scale = self._group.world_size / float(work.result()[0].item())
        for index, one in enumerate(self._named):
            gradient = one.parameter.grad
            if gradient is not None and (not changed or changed[index]):
                gradient.mul_(scale)

    def _agreed_order(self, own: Sequence[int] | None) -> list[int] | None:
        """Return the order in which rank 0's gradients became ready, as parameters' indices.

        Parameters without gradients come last. `own`: this rank's order; None if its backward pass
        failed. Returns None if it failed on any rank. Raises InvalidInput on all ranks if they run
        backward on different models. Collective.
        """
        assert self._group is not None
        rows = self._group.gather([self._number, None if own is None else list(own)])
        if len({number for number, _ in rows}) > 1:
            problem = "must be the same on all ranks, but ranks ran backward on different models"
            hint = "call the models' backward passes in the same order on all ranks"
            raise InvalidInput("module", problem, hint=hint)
        orders = [order for _, order in rows]
        if None in orders:
            return None
        # dict.fromkeys keeps the first of equal indices
        return list(dict.fromkeys((*orders[0], *range(len(self._named)))))

    def _agree(self) -> None:
        if self._exchange is None:
            self.open()
        # called at the end of the first backward pass, in which `_readiness` recorded the order
        order = self._agreed_order(self._readiness.order)
        if order is None:
            self._forget_gradients()
            problem = "the first backward pass failed on another rank, so no rank takes this step"
            raise StepDiscarded(problem)
        dense = [index for index in order if index not in self._sparse]
        self._layout = Layout.of(self._named, dense)
        self._is_arranged = True
        self._set_chunk(self._chunk)

    def _set_chunk(self, size: int | None) -> None:
        assert self._layout is not None
        self._chunk = size
        whole = (Chunk(0, self._layout.slots),) if self._layout.slots else ()
        self._chunks = self._layout.chunks(size) if size is not None and whole else whole
        # None remains for parameters with sparse gradients, which are in no chunk
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
        # only rank 0's times count, so that all ranks choose the same chunks
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
            self._step_end = time.monotonic()  # so that the next step's time excludes `gather`

    def _discard(self) -> None:
        began = self._readiness.began
        self._readiness.clear()
        self._readiness.exchanged()
        self._readiness.came = [False] * len(self._named)
        self._sent = []
        self._forget_gradients()
        if not self._is_arranged:
            # other ranks wait for this rank's order of gradients; None means that backward failed
            self._agreed_order(None)
        elif not self._chunks:
            problem = "cannot discard a step of sparse gradients after a failed backward pass"
            raise InvalidInput("exchange", problem, hint="end the run on all ranks")
        else:
            if not began:  # backward failed before the first gradient was ready
                self.began()
            self._opened().discard()

    def _forget_gradients(self) -> None:
        """Set all gradients to None, so that no optimizer uses them without averaging."""
        for one in self._named:
            one.parameter.grad = None
