"""DeviceTransfer returns the right means to a simulated GPU for any delays of kernels and copies.

Kernels of the compute stream write the gradients, as in backward. The number of a chunk's commands
does not depend on the number of tensors.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.core.errors import InvalidInput, StepDiscarded
from paceline.exchange.layout import Chunk, Layout, NamedParameter
from paceline.links.arena import Arena
from paceline.links.group import Group
from paceline.strategies.host.exchange import HostExchange
from paceline.strategies.host.transfer import DeviceTransfer, OverlapTimes, bytes_of
from refusals import refused
from simulated_gpu.device import SimulatedDevice
from simulated_gpu.lent import simulated_gpus
from simulated_gpu.tensors import devices

DEADLINE_S = 30.0
LONG_S = 0.03
SHAPES = ((3, 5), (7,), (2, 3, 4, 4), (1,), (130,))


class Rank:
    """Parameters like the given tensors, an arena, and the transfer between them.

    The arena of one rank stands in for several ranks: it halves the sums, so a rank gets back half
    of its gradients. A layer has `per_layer` tensors, and a chunk about `chunk_size` layers.
    """

    def __init__(
        self, device: SimulatedDevice, chunk_size: int, like: Sequence[Tensor], per_layer: int
    ) -> None:
        self.device, on, self.step = device, device.torch_device, 0
        self.parameters = [nn.Parameter(torch.zeros_like(one).to(on)) for one in like]
        self.layout = layout_of(*self.parameters, per_layer=per_layer)
        self.chunks = self.layout.chunks(chunk_size)
        sizes = self.layout.nbytes, len(self.layout.layers), self.layout.num_flags
        self.arena = Arena(Group.alone(on, DEADLINE_S), *sizes, DEADLINE_S, scale=0.5)
        self.arena.set_chunks(
            [[(s.offset, s.num_values, s.dtype) for s in chunk.slots] for chunk in self.chunks]
        )
        memory = self.arena.slot, self.arena.shared_result(0), self.arena.shared_result(1)
        self.unpin = [device.pin(part) for part in memory]
        self.times = OverlapTimes()
        self.transfer = DeviceTransfer(self.arena, self.layout, self.times, DEADLINE_S)
        post = self.arena.post

        def checked(chunk: int) -> None:
            """Post a chunk, and fail if its copy is not done: other ranks read it at once."""
            here = bytes_of(self.chunks[chunk], self.arena.slot)
            assert device.has_arrived(here), "posted before its copy is done"
            post(chunk)

        self.arena.post = checked  # type: ignore[method-assign]

    def close(self) -> None:
        """Close all parts in the order of `HostExchange`."""
        self.transfer.close()
        for unpin in self.unpin:
            unpin()
        self.arena.close()

    def begin(self) -> None:
        """Begin a step, in which all gradients change."""
        self.step += 1
        self.arena.begin(self.step)
        self.arena.flags[0, :, self.step % 2] = 1
        self.transfer.begin(self.step, self.chunks, None)

    def send(self, *chunks: Chunk) -> None:
        """Fill each gradient of these chunks with 10 * step + index, and send them."""
        for chunk in chunks:
            for slot in chunk.slots:
                gradient = torch.full_like(slot.parameter, float(10 * self.step))
                slot.parameter.grad = gradient.add_(slot.index)
            self.transfer.send(chunk, None)

    def finish(self) -> None:
        """Wait for the sums, and copy the means into the gradients."""
        self.transfer.arrive()
        self.arena.commit()
        self.transfer.receive(self.step)

    def exchange(self) -> None:
        """Run a whole step."""
        self.begin()
        self.send(*self.chunks)
        self.finish()

    def is_right(self) -> bool:
        """Whether all gradients are half of the values that `send` wrote."""
        return all(
            bool((parameter.grad == (10 * self.step + index) / 2).all().item())
            for index, parameter in enumerate(self.parameters)
        )


def layout_of(*parameters: nn.Parameter, per_layer: int = 1) -> Layout:
    """Return a layout of layers of `per_layer` parameters."""
    named = [NamedParameter(str(i // per_layer), str(i), p) for i, p in enumerate(parameters)]
    return Layout.of(named, range(len(named)))


@contextmanager
def rank(
    chunk_size: int = 1, like: Sequence[Tensor] = tuple(map(torch.zeros, SHAPES)), per_layer=1
) -> Iterator[Rank]:
    with simulated_gpus() as (device,):
        found = Rank(device, chunk_size, like, per_layer)
        yield found
        found.close()


def slow(device: SimulatedDevice, *kinds: str) -> None:
    """Delay work of these kinds: "h2d", "d2h" or "kernel"."""
    device.delays = lambda stream, what: (
        LONG_S if (what if what in ("h2d", "d2h") else "kernel") in kinds else 0.0
    )


@given(
    st.integers(1, 5),
    st.lists(
        st.fixed_dictionaries(
            {"kernel": st.sampled_from([0.0, 3e-4]), "d2h": st.sampled_from([0.0, 1e-3, 5e-3])}
            | {"h2d": st.sampled_from([0.0, 1e-3, 5e-3]), "in a new stream": st.booleans()}
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_means_are_right_for_any_delays(chunk_size, steps):
    with rank(chunk_size) as one:
        own = one.device.current_stream()
        for kinds in steps:
            one.device.delays = lambda stream, what, kinds=kinds: kinds.get(what, kinds["kernel"])
            stream = one.device.new_stream() if kinds["in a new stream"] else own
            with one.device.use(stream):
                one.exchange()
                assert one.is_right()
                for parameter in one.parameters:
                    parameter.grad = None
                stream.synchronize()  # another stream may free the gradients


def test_gradients_are_not_modified_before_the_end_of_backward():
    """A hook's kernel that reads a gradient must not read the mean, even if it runs late."""
    with rank(1) as one:
        slow(one.device, "kernel")
        one.begin()
        first, *others = one.chunks
        one.send(first)
        gradient = one.parameters[0].grad
        version = gradient._version
        read = gradient.clone()  # runs after the mean is back
        one.send(*others)
        assert gradient._version == version
        one.finish()
        assert (read == 10.0).all().item()
        assert one.is_right()


def test_a_gradient_that_changed_on_no_rank_is_not_modified():
    with rank(1) as one:
        one.begin()
        one.arena.flags[0, 1, one.step % 2] = 0
        one.send(*one.chunks)
        one.finish()
        assert (one.parameters[1].grad == 11.0).all().item()
        assert (one.parameters[0].grad == 5.0).all().item()


@pytest.mark.parametrize("sent", [0, 1, 3])
@pytest.mark.parametrize("waits", [False, True])
def test_the_step_after_a_discarded_one_is_right(sent, waits):
    """The step is discarded during copies to the host, or with `waits` during copies back."""
    with rank(1) as one:
        slow(one.device, *([] if waits else ["d2h"]), "h2d")
        one.begin()
        one.send(*one.chunks[:sent])
        if waits and sent:  # until the thread starts the copy of the first mean
            one.transfer._fetched[0].result(DEADLINE_S)
        one.arena.discard()
        one.transfer.abandon()
        for parameter in one.parameters[:sent]:
            assert parameter.grad is not None
        one.exchange()
        assert one.is_right()


def test_a_chunk_that_arrives_after_its_step_is_discarded_is_not_posted():
    with rank(1) as one:
        slow(one.device, "d2h")
        one.begin()
        one.send(one.chunks[0])
        one.arena.discard()
        with pytest.raises(StepDiscarded):
            one.transfer.arrive()
        one.transfer.abandon()


@pytest.mark.parametrize("fails", [False, True])
def test_memory_stays_pinned_until_all_copies_are_done(fails):
    with rank(1) as one:
        slow(one.device, "h2d")
        if not fails:
            one.exchange()  # the means are still being copied
            return
        one.begin()
        one.send(one.chunks[0])
        one.transfer._fetched[0].result(DEADLINE_S)
        one.arena.discard()  # as when another rank is lost: nothing waits for the copy


def test_steps_in_different_streams_use_the_buffer_one_after_another():
    with rank(2) as one:
        streams = [one.device.new_stream() for _ in range(3)]
        for stream in streams:
            with one.device.use(stream):
                one.exchange()
        streams[-1].synchronize()
        with one.device.use(streams[-1]):
            assert one.is_right()


def compute(one: Rank, count: int) -> None:
    """Queue `count` kernels."""
    values = torch.ones(4, device=one.device.torch_device)
    for _ in range(count):
        values = values * 2


def test_exchange_during_backward_is_hidden_and_after_it_exposed():
    """Kernels follow the first chunk; the last chunk follows the last kernel."""
    with rank(4) as one:
        slow(one.device, "kernel", "d2h", "h2d")
        one.begin()
        first, last = one.chunks
        one.send(first)
        one.transfer.count_times()
        compute(one, 8)
        one.send(last)
        one.finish()
        one.transfer.count_times()
        # Hidden: both copies of the first chunk. Exposed: both copies of the last, and a scatter.
        assert one.times.hidden_s >= 1.5 * LONG_S
        assert one.times.exposed_s >= 2 * LONG_S


def test_exchanges_that_overlap_are_hidden_once():
    with rank(1) as one:
        started_s = time.monotonic()
        slow(one.device, "d2h")
        one.begin()
        one.send(*one.chunks)  # copies of 1, 2, ..., 5 times LONG_S
        slow(one.device, "kernel")
        compute(one, 8)
        one.finish()
        one.transfer.count_times()
        assert one.times.hidden_s < time.monotonic() - started_s


def test_the_device_finishing_backward_after_the_host_is_not_exposed_time():
    with rank(4) as one:
        one.exchange()
        one.transfer.count_times()
        before = one.times.exposed_s
        slow(one.device, "kernel")
        compute(one, 40)
        one.device.delays = lambda stream, what: 0.0
        one.exchange()
        one.transfer.count_times()
        assert one.times.exposed_s - before < 40 * LONG_S


def exchange_on(device: SimulatedDevice) -> HostExchange:
    return HostExchange(Group.alone(device.torch_device, DEADLINE_S))


def parameter_on(device: SimulatedDevice) -> nn.Parameter:
    return nn.Parameter(torch.ones(2, device=device.torch_device))


def test_a_model_on_several_devices_is_refused():
    one, other = devices(2)
    with refused("model"):
        exchange_on(one).open(layout_of(parameter_on(one), parameter_on(other)))


def test_memory_that_cannot_be_pinned_is_refused_with_the_worker(device, monkeypatch):
    layout, exchange = layout_of(parameter_on(device)), exchange_on(device)
    exchange.open(layout)
    exchange.close()

    def fails(memory):
        raise InvalidInput("device", f"{memory.nbytes} bytes of host memory cannot be pinned")

    monkeypatch.setattr(device, "pin", fails)
    with refused("worker 0"):
        exchange_on(device).open(layout)


# --- the number of a chunk's commands: kernels, copies and waits of the host


class Commands(NamedTuple):
    """The commands of a step: kernels before and after the end of backward, copies and waits."""

    gathers: int
    d2h: int
    syncs: int
    h2d: int
    scatters: int


def commands_of(one: Rank, gradients: Sequence[Tensor | None]) -> Commands:
    """Exchange gradients, which halves them; return the commands."""
    for parameter, gradient in zip(one.parameters, gradients, strict=True):
        parameter.grad = gradient
    one.device.synchronize()
    counted = one.device.commands
    counted.clear()
    one.begin()
    for chunk in one.chunks:
        one.transfer.send(chunk, None)
    gathers = counted["kernel"]
    one.finish()
    scatters = counted["kernel"] - gathers
    return Commands(gathers, counted["d2h"], counted["sync"], counted["h2d"], scatters)


def randoms(count: int, *dtypes: torch.dtype) -> list[Tensor]:
    types = itertools.cycle(dtypes or (torch.float32,))
    return [torch.randn(1 + i % 7, 3, dtype=next(types)) for i in range(count)]


THREE_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("sent", "chunk_size", "instead", "expected"),
    [
        (randoms(1), 1, None, Commands(gathers=1, d2h=1, syncs=1, h2d=1, scatters=1)),
        (randoms(64), 64, None, Commands(gathers=1, d2h=1, syncs=1, h2d=1, scatters=1)),
        (randoms(16), 4, None, Commands(gathers=4, d2h=4, syncs=4, h2d=4, scatters=1)),
        (randoms(64, *THREE_TYPES), 64, None, Commands(3, d2h=1, syncs=1, h2d=1, scatters=3)),
        # The other gradients still share one kernel.
        (randoms(64), 64, lambda one: one.t().contiguous().t(), Commands(2, 1, 1, 1, scatters=2)),
        # Such strides differ between the weights and gradients of 1x1 convolutions.
        (
            [torch.randn(4, 3, 1, 1) for _ in range(16)],
            16,
            lambda one: one.as_strided((4, 3, 1, 1), (3, 1, 3, 3)),
            Commands(1, 1, 1, 1, 1),
        ),
    ],
    ids=["one", "many", "chunks", "dtypes", "another layout", "strides of size 1"],
)
def test_a_chunk_needs_one_gather_per_dtype_and_a_step_one_scatter_per_dtype(
    sent: list[Tensor], chunk_size: int, instead: Callable[[Tensor], Tensor], expected: Commands
):
    """A gradient in another layout, `instead` of the third one, needs one more of each."""
    with rank(1, sent, chunk_size) as one:
        gradients = [tensor.to(one.device.torch_device) for tensor in sent]
        if instead is not None:
            gradients[2] = instead(gradients[2])
        assert commands_of(one, gradients) == expected
        for parameter, gradient, tensor in zip(one.parameters, gradients, sent, strict=True):
            assert parameter.grad is gradient
            assert torch.equal(gradient.cpu(), tensor / 2)


@pytest.mark.parametrize("num_missing", [1, 16])
def test_missing_gradients_need_one_more_kernel_and_count_as_zero(num_missing):
    sent = randoms(16)
    with rank(1, sent, 16) as one:
        gradients = [tensor.to(one.device.torch_device) for tensor in sent]
        commands = commands_of(one, [None] * num_missing + gradients[num_missing:])
        assert commands.gathers == 1 + (num_missing < 16)
        assert (commands.d2h, commands.h2d) == (1, 1)
        for index, (parameter, tensor) in enumerate(zip(one.parameters, sent, strict=True)):
            assert torch.equal(parameter.grad.cpu(), tensor * (index >= num_missing) / 2)
