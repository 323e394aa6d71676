"""Interfaces of replicas and exchanges, statistics of exchanges, and a probe to time them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.codecs.stand_ins import stand_ins_for
from paceline.core.chunks import ChunkTimes, ChunkTuner
from paceline.core.workload import Cost, Layer, Parameter, Workload
from paceline.exchange.compressed import CodecAllReduce, Compression
from paceline.exchange.layout import Chunk, Layout
from paceline.links.group import Group
from paceline.record.recorder import Recorder
from paceline.training.models.paced import PacedModel, PacedSGD


@dataclass(frozen=True)
class Statistics:
    """Traffic and time of gradient exchanges so far on this rank.

    `bytes_sent`, `bytes_received`: bytes of gradients, and of parameters if a strategy sends them.
    `exposed_s`: total time spent exchanging instead of computing; None if unknown. `hidden_s`:
    total time of exchanges while backward passes compute; None if unknown. `chunk`: number of
    layers that are exchanged together. `codec`: the codec's name, and the reason for its choice.
    `num_nonfinite`: number of NaN and infinite gradient values on all ranks. With exchange "host",
    this number includes all values that were exchanged together with a NaN or infinite value.
    `num_skipped`: number of steps skipped because of such values. `sent_share`: fraction of values
    that this rank sent; None if the codec sends all values. Only if batches are balanced: `shares`,
    each rank's number of samples in a full batch, and `samples_per_s`, each rank's speed.
    """

    exchange: str
    num_steps: int
    bytes_sent: int
    bytes_received: int
    exposed_s: float | None
    hidden_s: float | None
    chunk: int | None = None
    codec: str | None = None
    num_nonfinite: int = 0
    num_skipped: int = 0
    sent_share: float | None = None
    shares: tuple[int, ...] | None = None
    samples_per_s: tuple[float | None, ...] | None = None


NONE = Statistics("none", 0, 0, 0, 0.0, 0.0)  # statistics of a rank that trains alone


class ModelReplica(Protocol):
    """A module whose gradients are averaged over ranks; the default methods exchange nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients accumulate on this rank without an exchange."""
        return nullcontext()

    def prepare(self, run: Callable[[], None]) -> None:
        """Call `run`, if the first backward pass sums gradients in another order than later ones.

        `run` is a forward and backward pass without effects, after which the order is that of later
        passes. Torch's reducer, for example, rebuilds its buckets after the first pass.
        """
        return

    def exchange_state(self) -> dict[str, Tensor]:
        """Return this rank's exchange state, such as error feedback."""
        return {}

    def load_exchange_state(self, state: dict[str, Tensor]) -> None:
        """Load an `exchange_state`; rank and number of ranks must be unchanged."""
        return

    def statistics(self) -> Statistics:
        """Return the traffic and time of all exchanges so far."""
        return NONE

    def record(self, recorder: Recorder | None) -> None:
        """Record all exchanges from now on; None stops recording."""
        return

    def close(self) -> None:
        """Free the exchange's resources; the module remains usable, but exchanges nothing."""
        return


class SingleReplica(ModelReplica):
    """The replica of a rank that trains alone: runs the module, and exchanges nothing."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass."""
        return self._module(*args, **kwargs)


class Exchange(Protocol):
    """Replaces each gradient that changed on any rank by its mean over all ranks.

    All methods except `ready` are collective. If `Method.chunk` is set, method `ready` sends the
    gradients of a chunk (adjacent layers) during backward. Otherwise, method `finish` sends all
    gradients. `touched`: by parameter, whether its gradient changed on this rank. `recorder`: set
    by the caller to record exchanges. `encoded`: the compressed all-reduce of this rank, if any.
    """

    recorder: Recorder | None = None
    encoded: CodecAllReduce | None = None

    def open(self, layout: Layout) -> None:
        """Allocate memory and process groups for gradients that are placed as in `layout`."""

    def arrange(self, layout: Layout, chunks: Sequence[Chunk]) -> None:
        """Use a new layout of the same size, and its chunks, from the next step on."""
        return

    def begin(self) -> None:
        """Begin a step, when the first gradient is ready."""
        return

    def ready(self, chunk: Chunk, touched: Sequence[bool]) -> None:
        """Start to exchange a chunk whose gradients are ready on this rank."""
        return

    def finish(self, touched: Sequence[bool]) -> Sequence[bool]:
        """Wait for the means; return by parameter whether its gradient changed on any rank."""

    def times(self) -> Sequence[ChunkTimes]:
        """Return the exchange times of the last step's chunks; empty if not measured."""
        return ()

    def discard(self) -> None:
        """Cancel the current step, because this rank's backward pass failed."""

    def state(self) -> dict[str, Tensor]:
        """Return this rank's error feedback; {} without a compressed all-reduce."""
        return self.encoded.codecs.state_dict() if self.encoded else {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Load a `state`; rank and number of ranks must be unchanged."""
        if self.encoded is not None:
            self.encoded.codecs.load_state_dict(state)

    def statistics(self) -> Statistics:
        """Return the traffic and time of all steps so far."""

    def close(self) -> None:
        """Free memory, threads and process groups."""


# number of layers per chunk, or a function that creates a tuner for a model's number of layers
Chunking = int | Callable[[int], ChunkTuner]


@dataclass(frozen=True)
class Method:
    """How a strategy averages gradients: by an `Exchange`, or by torch's own reducer.

    `make(group, as_views)`: creates the exchange; `as_views`: whether gradients may be views of the
    exchange's memory. Without `make`, torch's reducer averages gradients, encoded by `compression`
    if set. `chunk`: number of layers per chunk that the exchange sends during backward, or a
    factory of tuners that choose this number; None: all gradients are sent after backward.
    `takes_codec`: whether codecs are supported.
    """

    name: str
    make: Callable[[Group, bool], Exchange] | None = None
    chunk: Chunking | None = None
    compression: Compression | None = None
    takes_codec: bool = True

    @property
    def uses_torch_reducer(self) -> bool:
        """Whether DistributedDataParallel's own reducer is used."""
        return self.make is None


class Probe:
    """Exchanges gradients without computing them, so that the exchange can be timed; collective.

    Each call is one exchange of float32 gradients. `sizes`: for each layer, the bytes of each
    parameter; layers are in the order in which their gradients become ready. If the name of `codec`
    contains a fraction of values to send, gradients are chosen so that the codec sends this
    fraction. `barrier`: called after each exchange.
    """

    def __init__(
        self,
        sizes: Sequence[Sequence[int]],
        device: torch.device,
        replicate: Callable[[nn.Module], ModelReplica],
        codec: str | None = None,
        barrier: Callable[[], None] | None = None,
    ) -> None:
        layers = []
        for i, one in enumerate(reversed(sizes)):
            tensors = (Parameter(f"{i}.{j}", (nbytes // 4,)) for j, nbytes in enumerate(one))
            layers.append(Layer(str(i), tuple(tensors), 0, Cost(), Cost()))
        order, times = tuple(reversed(range(len(layers)))), [0.0] * len(layers)
        workload = Workload("probe", 1, tuple(layers), order, 0)
        with device:
            # exchange zeros, or values like gradients if the number of bytes sent depends on values
            self._module = PacedModel(workload, times, times, (), stand_ins_for(codec))
        self._replica, self._barrier = replicate(self._module), barrier
        self._inputs = torch.zeros(1, device=device)
        # calls need an optimizer step, because some exchanges run in optimizer hooks
        self._optimizer = PacedSGD(self._module.parameters(), 0.0)

    def __call__(self) -> None:
        """Exchange the gradients of all layers once."""
        self._replica(self._inputs).backward()
        if self._barrier is not None:
            self._barrier()
        self._optimizer.step()
        self._module.zero_grad()

    def close(self) -> None:
        """Free the resources of the exchange."""
        self._replica.close()
