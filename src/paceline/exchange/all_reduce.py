"""Communication hooks for DDP that encode (compress), record and count gradient buckets."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_comm_hook
from torch.autograd import Variable
from torch.distributed import GradBucket  # type: ignore[attr-defined] # exported but not declared

from paceline.codecs.codec import Codec
from paceline.core.errors import InvalidInput
from paceline.core.plan import Kind
from paceline.exchange.compressed import CodecAllReduce, Compression, Future
from paceline.exchange.layout import NamedParameter
from paceline.exchange.optimizers import NonFiniteGuard, Policy
from paceline.exchange.readiness import Listener, Readiness
from paceline.exchange.replica import Method, Statistics
from paceline.links.devices import current_gpu
from paceline.links.group import Group
from paceline.record.recorder import Recorder

# Codecs encode float32 values, and float32 represents all values of these dtypes exactly.
_ENCODED = (torch.float32, torch.float16, torch.bfloat16)
_DEADLINE_S = 1800.0  # torch's default timeout for gloo


class HookState(CodecAllReduce):
    """State of the hook from `ddp_hook`: process groups, error feedback and counters."""

    def __init__(
        self,
        compression: Compression,
        ranks: Sequence[int],
        device: torch.device,
        deadline_s: float,
    ) -> None:
        self.guard = NonFiniteGuard(compression.on_nonfinite)
        super().__init__(compression.codec, ranks, device, deadline_s)
        self.recorder: Recorder | None = None
        self._numbers: dict[int, int] = {}  # index of each parameter, by id(parameter)

    @property
    def num_nonfinite(self) -> int:
        """Number of NaN and infinite gradient values so far, over all ranks."""
        return self.guard.num_nonfinite

    @property
    def num_skipped(self) -> int:
        """Number of steps skipped because of NaN or infinite gradients."""
        return self.guard.num_skipped

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start to average a bucket over ranks; return a future of the averaged gradients."""
        gradients = bucket.buffer()
        if gradients.dtype not in _ENCODED:
            problem = "requires float32, float16 or bfloat16 gradients"
            raise InvalidInput("codec", problem, got=gradients.dtype)
        parameters = bucket.parameters()
        self.guard.watch(parameters)
        if bucket.index() == 0:  # the first bucket of every step
            self.begin_step()
        if self.is_plain and self.device.type == "cpu":
            num_ranks = len(self._ranks)
            self._bytes_sent[0] += gradients.nbytes * 2 * (num_ranks - 1) // num_ranks
            return _averaged(bucket, num_ranks, self._groups[0], self.recorder, self._count)
        # Error feedback is stored by key. The key identifies the bucket's parameters, so that a
        # bucket that torch has rebuilt from other parameters starts without error feedback.
        numbers = [self._numbers.setdefault(id(one), len(self._numbers)) for one in parameters]
        checksum = zlib.crc32(str(numbers).encode())
        key = f"bucket{bucket.index()}of{len(gradients)}/{checksum:08x}"
        recorder = self.recorder
        recorded = recorder.begin(Kind.REDUCE, str(bucket.index())) if recorder else None
        work = self.reduce(key, gradients.float(), len(self._ranks))

        def done(future: Future) -> Tensor:
            if recorder is not None:
                recorder.end(recorded)
            values = future.value()
            self.guard.found(work.num_nonfinite)
            return gradients if values is gradients else gradients.copy_(values)

        return work.future.then(done)

    def _count(self, averaged: Tensor) -> None:
        self.guard.found(int((~averaged.isfinite()).sum()))

    def close(self) -> None:
        """End the threads that exchange gradients; the hook is unusable afterwards."""
        self.guard.close()
        super().close()


Hook = Callable[[HookState, GradBucket], torch.futures.Future[Tensor]]


def ddp_hook(
    codec: str | Codec,
    on_nonfinite: Policy = "raise",
    process_group: dist.ProcessGroup | None = None,
    deadline_s: float = _DEADLINE_S,
) -> tuple[HookState, Hook]:
    """Return a state and a hook, to be used as in `register_comm_hook(*ddp_hook("dynamic8"))`.

    All ranks must call `ddp_hook` at the same point, with the same codec. `codec`: a name, a codec
    object, or "auto", which uses dynamic8 only if encoding makes steps faster. `process_group`: the
    process group of the DistributedDataParallel, with backend gloo or nccl. `deadline_s`: longest
    wait for another rank. Raises InvalidInput for unsupported arguments.

    If a gradient is NaN or infinite on any rank, no rank updates its parameters in this step.
    A GradScaler then skips the step. Without a GradScaler, `optimizer.step()` raises NonFinite or,
    with `on_nonfinite="skip"`, does nothing. The state counts NaN and infinite values and skipped
    steps. Torch rebuilds its buckets after the first step, which drops error feedback.
    """
    if not dist.is_initialized():
        hint = "call torch.distributed.init_process_group first"
        raise InvalidInput("ddp_hook", "requires a process group", hint=hint)
    ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    # look for a part of the name, because a backend can be "cpu:gloo,cuda:nccl"
    has_nccl = "nccl" in dist.get_backend_config(process_group)
    device = current_gpu() if has_nccl else torch.device("cpu")
    state = HookState(Compression(codec, on_nonfinite), ranks, device, deadline_s)
    return state, HookState.exchange


class TorchAllReduce(Listener):
    """Counts, encodes or records the gradient exchanges of DistributedDataParallel's C++ reducer.

    `on_exchanged`, if given, is called at the end of each backward pass that exchanges gradients.
    """

    is_searched = False  # as in Paceline's `Reducer`; torch's reducer has no chunks to search

    def __init__(
        self,
        method: Method,
        parameters: Sequence[NamedParameter],
        join: Callable[[], Group],
        on_exchanged: Callable[[], None] | None,
    ) -> None:
        self._name, self._compression, self._join = method.name, method.compression, join
        self._nbytes = sum(one.parameter.nbytes for one in parameters)
        self._on_exchanged = on_exchanged
        self._num_steps = 0
        self._recorder: Recorder | None = None
        self._hook: HookState | None = None
        self._call_once: Callable[[], None] | None = None
        self._parameters = parameters
        self._readiness: Readiness | None = None
        if on_exchanged is not None:
            self._watch()

    def _watch(self) -> None:
        num_parameters = len(self._parameters)
        self._readiness = Readiness(self._parameters, self, sparse=range(num_parameters))
        self._readiness.expect([None] * num_parameters)

    def after_next_exchange(self, call: Callable[[], None]) -> None:
        """Run `call` once, after the next backward pass that exchanges all gradients."""
        self._call_once = call
        if self._readiness is None:
            self._watch()

    def register(self, reducer: Any, recorder: Recorder | None) -> None:
        """Register a hook on torch's `reducer`; without codec and recorder, do nothing."""
        self._recorder = recorder
        if self._compression is not None or recorder is not None:
            _register_comm_hook(reducer, self, TorchAllReduce._exchange)

    def _exchange(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        self.open()
        if self._hook is None:
            group = self._join()
            return _averaged(bucket, group.world_size, group.process_group, self._recorder)
        self._hook.recorder = self._recorder
        return self._hook.exchange(bucket)

    def open(self) -> None:
        """Create the hook's process groups and threads before the first bucket; collective.

        Raises InvalidInput if ranks have different codecs.
        """
        if self._compression is not None and self._hook is None:
            group = self._join()
            ranks = group.global_ranks
            self._hook = HookState(self._compression, ranks, group.device, group.deadline_s)

    @property
    def pending(self) -> bool:
        """Whether a forward pass has requested an exchange that has not ended yet."""
        return self._readiness is not None and self._readiness.pending

    def forwarded(self, outputs: Sequence[Tensor], synchronize: bool) -> None:
        """Record a forward pass; `synchronize`: whether its backward pass exchanges gradients."""
        self._num_steps += synchronize
        if self._readiness is not None:
            self._readiness.forwarded(outputs, synchronize)

    def state(self) -> dict[str, Tensor]:
        """Return this rank's error feedback, by key; empty without a codec."""
        return {} if self._hook is None else self._hook.codecs.state_dict()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Load error feedback that this rank saved; collective, with as many ranks as before."""
        self.open()
        if self._hook is not None:
            self._hook.codecs.load_state_dict(state)

    def statistics(self) -> Statistics:
        """Return bytes sent and counters of all steps; exchange times are not measured."""
        hook, steps = self._hook, self._num_steps
        if hook is None:  # in a ring all-reduce, each rank sends 2 (n - 1) / n of its gradients
            n = self._join().world_size
            sent = self._nbytes * 2 * (n - 1) // n * steps
            return Statistics(self._name, steps, sent, sent, None, None)
        sent, found = hook.bytes_sent, (hook.num_nonfinite, hook.num_skipped)
        known = self._name, steps, sent, sent, None, None, None, hook.why, *found
        return Statistics(*known, sent_share=hook.codecs.sent_share)

    def close(self) -> None:
        """End the codec's threads, and remove the hooks."""
        self._unwatch()
        if self._hook is not None:
            self._hook.close()

    def _unwatch(self) -> None:
        if self._readiness is not None:
            self._readiness.close()
            self._readiness = None

    def ended(self, missing: Sequence[int]) -> None:
        """End a backward pass: call `on_exchanged`, and queue the call of `after_next_exchange`."""
        assert self._readiness is not None
        call, self._call_once = self._call_once, None
        if call is not None and all(self._readiness.came):
            # queued, so that `call` runs after torch's own callback, which ends the exchange
            Variable._execution_engine.queue_callback(call)
        if self._on_exchanged is not None:
            self._on_exchanged()
        elif call is not None:
            self._unwatch()


def _averaged(
    bucket: GradBucket,
    num_ranks: int,
    group: dist.ProcessGroup | None,
    recorder: Recorder | None,
    on_averaged: Callable[[Tensor], None] = lambda averaged: None,
) -> torch.futures.Future[Tensor]:
    """Average a bucket over ranks, with results bit-identical to DDP without a hook."""
    exchange = recorder.begin(Kind.REDUCE, str(bucket.index())) if recorder else None

    def done(future: torch.futures.Future[Any]) -> Tensor:
        if recorder is not None:
            recorder.end(exchange)
        averaged: Tensor = future.value()[0]
        on_averaged(averaged)
        return averaged

    # torch's allreduce_hook is not used, because it rounds differently from DDP without a hook
    values = bucket.buffer().mul_(1.0 / num_ranks)
    work = dist.all_reduce(values, group=group, async_op=True)
    assert work is not None
    future: torch.futures.Future[Tensor] = work.get_future().then(done)
    return future
