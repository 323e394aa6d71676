"""The gradients of the body: averaged layer by layer, each as soon as backward has it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.core.errors import InvalidInput, NonFinite
from paceline.exchange.codec_choice import choice_of
from paceline.exchange.compressed import CompressedAllReduce, Work
from paceline.exchange.layout import Chunk, Layout
from paceline.exchange.replica import Statistics
from paceline.links.group import Group
from paceline.record.recorder import Recorder
from paceline.strategies.subbatch.lane import Flight, Joined, Lane
from paceline.tune.chunk import ChunkTimes


@dataclass(frozen=True)
class _Encoded:
    """A compressed all-reduce that is under way."""

    work: Work
    layer: str

    def wait(self) -> Tensor:
        """Return the means. NonFinite on all ranks if some value was not finite on any."""
        values = self.work.future.wait()
        if self.work.num_nonfinite:
            raise NonFinite(
                f"gradients of layer {self.layer!r}: {self.work.num_nonfinite} values of some rank "
                "are NaN or infinite, and no codec carries these"
            )
        return values


class LayerGradients:
    """All-reduces of single layers on a lane: what `Synchronized` exchanges gradients by.

    Beside its gradients a layer's message says which of them have changed on this rank; without a
    codec, one that has changed on no rank stays as it is on all.
    """

    name = "subbatch"
    chunked = True

    def __init__(self, lane: Lane, group: Group, codec: str | None) -> None:
        self.recorder: Recorder | None = None
        self._lane, self._group = lane, group
        self._flying: list[tuple[Chunk, Flight]] = []
        self._late: list[Chunk] = []
        self._num_steps = self._nbytes = 0
        self._all_reduce, self._choice = None, None
        if codec is not None:
            ranks = range(group.world_size)
            self._all_reduce = CompressedAllReduce(ranks, group.device, group.deadline_s)
            self._choice = choice_of(codec, self._all_reduce)
        self._nbytes_before = self._all_reduce.bytes_sent if self._all_reduce else 0

    def open(self, layout: Layout) -> None:
        """Check that a message can hold the gradients of a layer: they are of one type."""
        kinds = list(dict.fromkeys(slot.parameter.dtype for slot in layout.slots))
        encodable = not self._choice or kinds[0] == torch.float32
        if len(kinds) > 1 or kinds[0].is_complex or not encodable:
            wanted = "float32 for a codec" if self._choice else "one real type"
            raise InvalidInput(
                f"body: has parameters of {', '.join(map(str, kinds))}; strategy subbatch trains "
                f"bodies of {wanted}"
            )

    def arrange(self, layout: Layout, chunks: Sequence[Chunk]) -> None:
        """Each chunk is a layer."""

    def times(self) -> Sequence[ChunkTimes]:
        """There is no size of chunks to be found."""
        return ()

    def begin(self) -> None:
        """Begin a step."""
        self._flying, self._late = [], []
        if self._all_reduce is not None and self._choice is not None:
            self._all_reduce.begin_step()
            self._choice.begin_step()

    def ready(self, chunk: Chunk, touched: Sequence[bool]) -> None:
        """Begin to average a layer; after backward, if the lane waits for each."""
        if self._lane.waits:
            self._late.append(chunk)
        else:
            self._begin(chunk, touched)

    def _begin(self, chunk: Chunk, touched: Sequence[bool]) -> None:
        layer = chunk.slots[0].layer
        gradients = [_flat(slot.parameter) for slot in chunk.slots]
        recorder = self.recorder
        joined = recorder.join_exchange(layer) if recorder else None

        def done(*_: float) -> None:
            if recorder is not None:
                recorder.leave_exchange(joined)

        if self._all_reduce is not None and self._choice is not None:
            values, all_reduce = torch.cat(gradients), self._all_reduce
            name, codec = self._choice.codec_of(len(values))
            key, size = f"{layer}/{name}", self._group.world_size
            work = all_reduce.begin(key, values, codec, size)
            flight = self._lane.begin(lambda: _Encoded(work, layer), done)
        else:
            changed = [float(touched[slot.index]) for slot in chunk.slots]
            values = torch.cat([*gradients, gradients[0].new_tensor(changed)])
            self._nbytes += 2 * (self._group.world_size - 1) * values.nbytes
            flight = self._lane.begin(lambda: self._joined(values), done)
        self._flying.append((chunk, flight))

    def _joined(self, values: Tensor) -> Joined:
        work = dist.all_reduce(values, group=self._lane.process_group, async_op=True)
        assert work is not None  # this rank is one of the group
        return Joined(work, values)

    @torch.no_grad()
    def finish(self, touched: Sequence[bool]) -> Sequence[bool]:
        """Wait until every gradient is the mean over all ranks."""
        anywhere = [False] * len(touched)
        for chunk in self._late:
            self._begin(chunk, touched)
        for chunk, flight in self._flying:
            sizes = [slot.parameter.numel() for slot in chunk.slots]
            found = flight.result()
            changed = [1.0] * len(sizes)
            if self._all_reduce is None:
                changed = found[sum(sizes) :].tolist()
                found = found[: sum(sizes)].div_(self._group.world_size)
            for slot, mean, times in zip(chunk.slots, found.split(sizes), changed, strict=True):
                if not times:
                    continue
                gradient = slot.parameter.grad
                if gradient is None:
                    gradient = slot.parameter.grad = torch.empty_like(slot.parameter)
                gradient.copy_(mean.view(gradient.shape))
                anywhere[slot.index] = True
        self._flying, self._late = [], []
        self._num_steps += 1
        return anywhere

    def discard(self) -> None:
        """Refuse to go on: the others wait for gradients that will not come."""
        raise InvalidInput(
            "strategy: a backward pass failed on this rank, and subbatch cannot take a step back"
        )

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has handed to the others: in a ring 2 (n - 1) / n of each."""
        encoded = self._all_reduce.bytes_sent - self._nbytes_before if self._all_reduce else 0
        return encoded + self._nbytes // self._group.world_size

    def statistics(self) -> Statistics:
        """Return what it has taken so far."""
        sent = self.bytes_sent
        return Statistics(self.name, self._num_steps, sent, sent, None, None)

    def close(self) -> None:
        """End what encodes."""
        if self._all_reduce is not None:
            self._all_reduce.close()


def _flat(parameter: torch.nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
    return parameter.grad.detach().reshape(-1)
