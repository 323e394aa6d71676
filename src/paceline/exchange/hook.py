"""Compressed gradients in a program that already uses DistributedDataParallel: one line more."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.codecs.codec import Codec
from paceline.core.errors import InvalidInput
from paceline.exchange.codec_choice import choice_of
from paceline.exchange.compressed import CompressedAllReduce, Compression, Future, Work
from paceline.exchange.nonfinite import NonFiniteGuard, Policy
from paceline.record.recorder import Recorder

_ROUNDED = (torch.float16, torch.bfloat16)  # exact in float32, and rounded to again
_DEADLINE_S = 1800.0  # torch's own

Hook = Callable[["HookState", "dist.GradBucket"], torch.futures.Future[Tensor]]  # type: ignore[name-defined]


class HookState:
    """What the hook keeps: the process groups, what codecs remember, and counts."""

    def __init__(
        self,
        compression: Compression,
        ranks: Sequence[int],
        device: torch.device,
        deadline_s: float,
    ) -> None:
        self.guard = NonFiniteGuard(compression.on_nonfinite)
        self._world_size = len(ranks)
        self._all_reduce = CompressedAllReduce(ranks, device, deadline_s)
        try:
            self._choice = choice_of(compression.codec, self._all_reduce)
        except InvalidInput:
            self._all_reduce.close()
            raise
        self._nbytes_before = self._all_reduce.bytes_sent  # of measuring which codec pays
        self.recorder: Recorder | None = None
        self._numbers: dict[int, int] = {}  # of parameters, in the order in which they first came

    @property
    def bytes_sent(self) -> int:
        """Bytes of gradients that this rank has handed to the others."""
        return self._all_reduce.bytes_sent - self._nbytes_before

    @property
    def num_nonfinite(self) -> int:
        """How many values were NaN or infinite so far, on all ranks."""
        return self.guard.num_nonfinite

    @property
    def num_skipped(self) -> int:
        """How many steps were skipped because of them."""
        return self.guard.num_skipped

    def exchange(self, bucket: Any) -> Future:
        """Begin to average a bucket; the future has its gradients."""
        gradients = bucket.buffer()
        _check(gradients)
        self.guard.watch(bucket.parameters())
        if bucket.index() == 0:
            self._all_reduce.begin_step()
            self._choice.begin_step()
        name, codec = self._choice.codec_of(len(gradients))
        key = f"bucket{bucket.index()}of{len(gradients)}/{self._order(bucket):08x}/{name}"
        recorder = self.recorder
        recorded = recorder.join_exchange(str(bucket.index())) if recorder else None
        work = self._all_reduce.begin(key, gradients.float(), codec, self._world_size)

        def done(future: Future) -> Tensor:
            if recorder is not None:
                recorder.leave_exchange(recorded)
            return self._taken(work, gradients, future.value())

        return work.future.then(done)

    @property
    def why(self) -> str:
        """Say which codec is used, and on which figures that rests."""
        return self._choice.why

    def state_dict(self) -> dict[str, Tensor]:
        """Return what this rank's codecs remember, for its checkpoint."""
        return self._all_reduce.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over what the same rank of as many has written."""
        self._all_reduce.load_state_dict(state)

    def close(self) -> None:
        """End the threads. The hook cannot be used after that."""
        self.guard.close()
        self._all_reduce.close()

    def _order(self, bucket: Any) -> int:
        """Return a checksum of which parameters are in a bucket, in their order."""
        numbers = [
            self._numbers.setdefault(id(parameter), len(self._numbers))
            for parameter in bucket.parameters()
        ]
        return zlib.crc32(str(numbers).encode())

    def _taken(self, work: Work, gradients: Tensor, values: Tensor) -> Tensor:
        self.guard.found(work.num_nonfinite)
        return gradients if values is gradients else gradients.copy_(values)


def ddp_hook(
    codec: str | Codec,
    on_nonfinite: Policy = "raise",
    process_group: dist.ProcessGroup | None = None,
    deadline_s: float = _DEADLINE_S,
) -> tuple[HookState, Hook]:
    """Return what `DistributedDataParallel.register_comm_hook` takes: `(*ddp_hook("dynamic8"))`.

    All ranks must call it together, with the same codec: a name, a codec, or "auto", which encodes
    with dynamic8 what is faster so, and nothing if steps are not. `process_group` is
    that of the DistributedDataParallel, of backend gloo or nccl. Raises InvalidInput for what does
    not fit. A step with values that are not finite, on any rank, is one that no rank takes: a
    GradScaler skips it; otherwise the optimizer raises NonFinite, or by `on_nonfinite="skip"`
    changes nothing. The state counts them.

    What codecs with error feedback remember belongs to a bucket; torch makes its buckets anew after
    the first step, whose errors are dropped.
    """
    if not dist.is_initialized():
        raise InvalidInput("ddp_hook: call torch.distributed.init_process_group before")
    ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    compression = Compression(codec, on_nonfinite)
    return HookState(compression, ranks, _device_of(process_group), deadline_s), exchange_bucket


def exchange_bucket(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """Begin to average a bucket: what DistributedDataParallel calls."""
    return state.exchange(bucket)


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    if "nccl" in dist.get_backend_config(group):  # alone, or beside gloo for values in host memory
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _check(gradients: Tensor) -> None:
    if gradients.dtype != torch.float32 and gradients.dtype not in _ROUNDED:
        raise InvalidInput(
            f"codec: gradients of {gradients.dtype} would lose precision that float32 does not "
            "have; train in float32, float16 or bfloat16, or without a codec"
        )
