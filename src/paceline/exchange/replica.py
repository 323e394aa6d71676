"""The interfaces of data parallelism: a replica of a module, an exchange, and its statistics."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.codecs.stand_ins import stand_ins_for
from paceline.core.chunks import ChunkTimes, ChunkTuner
from paceline.exchange.compressed import Compression
from paceline.exchange.layout import Chunk, Layout
from paceline.links.group import Group
from paceline.record.recorder import Recorder
from paceline.training.models.paced import PacedSGD


@dataclass(frozen=True)
class Statistics:
    """Traffic and time of the exchange of gradients so far, on this rank.

    `bytes_sent` and `bytes_received` are gradient bytes (parameters too, where a strategy sends
    them) that this rank handed to the others and got from them. `exposed_s` is the time in which
    this rank exchanged instead of computing, `hidden_s` that in which the exchange ran beside the
    backward pass; both are totals over `num_steps`, or None where the exchange cannot be seen from
    outside. `chunk` is the number of layers exchanged together, where there are chunks. With a
    `codec` (its name, and why it is this one) `num_nonfinite` gradient values were NaN or infinite
    so far on any rank (with exchange "host": those that were exchanged together with one), and
    optimizers have skipped `num_skipped` steps because of them. `sent_share`: the part of this
    rank's values that a codec has sent, where it leaves some out. Where batches are balanced,
    `shares` are the samples of each rank in a whole batch, and `samples_per_s` what each computes,
    as far as it is known.
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


NONE = Statistics("none", 0, 0, 0, 0.0, 0.0)  # of a rank with nobody to exchange with


class ModelReplica(Protocol):
    """A module that is called as before, and whose gradients are those of all ranks' samples.

    What is here is that of a replica whose exchange remembers and records nothing.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients are added up on this rank, and not exchanged."""
        return nullcontext()

    def prepare(self, run: Callable[[], None]) -> None:
        """Call `run`, a pass whose gradients nobody uses, if the next exchange depends on one.

        Torch's reducer sums in the order of its buckets, which it makes anew after its first pass.
        """
        return

    def exchange_state(self) -> dict[str, Tensor]:
        """Return what the exchange remembers on this rank, such as error feedback."""
        return {}

    def load_exchange_state(self, state: dict[str, Tensor]) -> None:
        """Take over what the same rank, of as many, has remembered."""
        return

    def statistics(self) -> Statistics:
        """Return the traffic and time of the exchange so far, and which one it is."""
        return NONE

    def record(self, recorder: Recorder | None) -> None:
        """Record all exchanges from now on; None ends that."""
        return

    def close(self) -> None:
        """Free the resources of the exchange; the module stays usable, and trains alone."""
        return


class SingleReplica(ModelReplica):
    """The replica of a single rank, which has no other to exchange with."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass."""
        return self._module(*args, **kwargs)


class Exchange(Protocol):
    """Replaces gradients by their mean. All ranks call all methods but `ready` in the same order.

    An exchange that is `chunked` reads gradients as they become ready, any other after backward.
    `touched`: for each parameter, True if its gradient has changed on this rank. A gradient that
    has changed on no rank stays as it is on all.
    """

    name: str
    chunked: bool
    recorder: Recorder | None

    def open(self, layout: Layout) -> None:
        """Allocate memory and groups for gradients of this layout, on all ranks together."""

    def arrange(self, layout: Layout, chunks: Sequence[Chunk]) -> None:
        """Exchange these chunks from the next step on; the layout has the bytes it had before."""
        return  # without chunks there is nothing to arrange

    def begin(self) -> None:
        """Begin a step."""
        return

    def ready(self, chunk: Chunk, touched: Sequence[bool]) -> None:
        """Begin to exchange the chunk: this rank's part of it is there."""
        return  # one that is not `chunked` sends all gradients in `finish`

    def finish(self, touched: Sequence[bool]) -> Sequence[bool]:
        """Wait until gradients that changed on any rank are means; return for each if it did."""

    def times(self) -> Sequence[ChunkTimes]:
        """Return when each chunk of the last step was ready and exchanged, where that is known."""
        return ()

    def discard(self) -> None:
        """Abandon the step that has begun: this rank's backward pass has failed."""

    def state(self) -> dict[str, Tensor]:
        """Return what it remembers on this rank from step to step, such as error feedback."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over what the same rank, of as many, has remembered."""
        return

    def statistics(self) -> Statistics:
        """Return the traffic and time so far."""

    def close(self) -> None:
        """Free memory, threads and groups."""


Chunking = int | Callable[[int], ChunkTuner]  # layers, or a tuner for a model of so many


@dataclass(frozen=True)
class Method:
    """A way of exchanging gradients, as a strategy offers it.

    `make` returns the exchange for a group; its second argument says whether gradients may be views
    of the exchange's memory. Without `make`, torch's reducer exchanges them, encoded if there is a
    `compression`. `chunk`: the number of layers that are exchanged together, or a factory of tuners
    for a model of so many layers. `is_chunked`: False if `chunk` has no meaning for the exchange.
    """

    name: str
    make: Callable[[Group, bool], Exchange] | None = None
    chunk: Chunking = 1
    compression: Compression | None = None
    is_chunked: bool = False
    takes_codec: bool = True

    @property
    def uses_torch_reducer(self) -> bool:
        """True if gradients travel in the buckets of DistributedDataParallel's own reducer."""
        return self.make is None


_Like = Callable[[Tensor], Tensor]


class _Ready(torch.autograd.Function):
    """Hands out gradients at once, so that a backward pass takes only the time of the exchange."""

    @staticmethod
    def forward(
        ctx: Any, after: Tensor, gradients: Sequence[Tensor], hand_out: _Like, *_: Tensor
    ) -> Tensor:
        ctx.gradients, ctx.hand_out = gradients, hand_out
        return after.detach()

    @staticmethod
    def backward(ctx: Any, *of_after: Tensor) -> tuple[Tensor | None, ...]:
        # Aliases, if they may be: autograd need not copy these.
        return of_after[0], None, None, *map(ctx.hand_out, ctx.gradients)


class _ProbeLayer(nn.Module):
    """A layer that computes nothing and has its parameters' gradients at once."""

    def __init__(self, sizes: Sequence[int], device: torch.device, like: _Like | None) -> None:
        super().__init__()
        # Values matter only where they decide how many bytes travel: time is bytes and order.
        zeros = [torch.zeros(nbytes // 4, device=device) for nbytes in sizes]
        self.weights = nn.ParameterList(nn.Parameter(one) for one in zeros)
        self.gradients = list(map(like or torch.zeros_like, zeros))
        # An exchange may write its result there.
        self._hand_out = torch.clone if like else Tensor.detach

    def forward(self, after: Tensor) -> Tensor:
        result: Tensor = _Ready.apply(after, self.gradients, self._hand_out, *self.weights)  # type: ignore[no-untyped-call]
        return result


class Probe:
    """Exchanges the float32 gradients of some layers each time it is called.

    `sizes` are the bytes of each parameter of each layer, in the order in which layers are ready.
    `codec` names the one by which they travel. `barrier` is waited at after each exchange, if its
    ranks do not end together.

    All ranks must make it, call it and close it together.
    """

    def __init__(
        self,
        sizes: Sequence[Sequence[int]],
        device: torch.device,
        replicate: Callable[[nn.Module], ModelReplica],
        codec: str | None = None,
        barrier: Callable[[], None] | None = None,
    ) -> None:
        like = stand_ins_for(codec)
        layers = [_ProbeLayer(one, device, like) for one in reversed(sizes)]
        self._module = nn.Sequential(*layers)
        self._replica, self._barrier = replicate(self._module), barrier
        self._scalar = torch.zeros((), device=device)
        # Exchanges with hooks around optimizer steps must see one.
        self._optimizer = PacedSGD(self._module.parameters(), 0.0)

    def __call__(self) -> None:
        """Exchange once."""
        self._replica(self._scalar).backward()
        if self._barrier is not None:
            self._barrier()
        self._optimizer.step()
        self._module.zero_grad()

    def close(self) -> None:
        """Free the resources of the exchange."""
        self._replica.close()
