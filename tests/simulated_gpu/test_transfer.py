"""DeviceTransfer returns the right means to a simulated GPU for any delays of kernels and copies.

Kernels of the compute stream write the gradients, as in backward.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.core.errors import InvalidInput, StepDiscarded
from paceline.exchange.layout import Chunk, Layout, NamedParameter
from paceline.links.group import Group
from paceline.strategies.host.exchange import HostExchange
from paceline.strategies.host.transfer import bytes_of
from refusals import refused
from simulated_gpu.device import SimulatedDevice
from simulated_gpu.lent import simulated_gpus
from simulated_gpu.one_rank import DEADLINE_S, OneRank
from simulated_gpu.tensors import devices

LONG_S = 0.03
SHAPES = ((3, 5), (7,), (2, 3, 4, 4), (1,), (130,))


class Rank(OneRank):
    """A rank with a parameter of each shape, each in its own layer."""

    def __init__(self, device: SimulatedDevice, chunk_size: int) -> None:
        layers = [str(index) for index in range(len(SHAPES))]
        super().__init__(device, [torch.zeros(shape) for shape in SHAPES], layers, chunk_size)
        self.step = 0
        post = self.arena.post

        def checked(chunk: int) -> None:
            """Post a chunk, and fail if its copy is not done: other ranks read it at once."""
            here = bytes_of(self.chunks[chunk], self.arena.slot)
            assert device.has_arrived(here), "posted before its copy is done"
            post(chunk)

        self.arena.post = checked  # type: ignore[method-assign]

    def begin(self) -> None:
        """Begin a step, in which all gradients change."""
        self.step += 1
        self.begin_step(self.step)

    def send(self, chunk: Chunk) -> None:
        """Write the chunk's gradients, and send them."""
        for slot in chunk.slots:
            self.make(slot.index)
        self.transfer.send(chunk, None)

    def make(self, index: int) -> None:
        """Fill a gradient with 10 * step + index."""
        on = self.device.torch_device
        gradient = torch.full(SHAPES[index], float(10 * self.step), device=on)
        self.parameters[index].grad = gradient.add_(index)

    def make_all(self) -> None:
        """Write all gradients, with four-dimensional gradients in channels_last."""
        for index, parameter in enumerate(self.parameters):
            self.make(index)
            if parameter.dim() == 4:
                parameter.grad = parameter.grad.contiguous(memory_format=torch.channels_last)

    def finish(self) -> None:
        """Wait for the sums, and copy the means into the gradients."""
        self.transfer.arrive()
        self.arena.commit()
        self.transfer.receive(self.step)

    def send_all(self) -> None:
        """Send all chunks with the present gradients."""
        for chunk in self.chunks:
            self.transfer.send(chunk, None)

    def exchange(self) -> None:
        """Run a whole step."""
        self.begin()
        for chunk in self.chunks:
            self.send(chunk)
        self.finish()

    def is_right(self) -> bool:
        """Whether all gradients are half of the values that `make` wrote."""
        return all(
            bool((parameter.grad == (10 * self.step + index) / 2).all().item())
            for index, parameter in enumerate(self.parameters)
        )


@contextmanager
def rank(chunk_size: int = 1) -> Iterator[Rank]:
    with simulated_gpus() as (device,):
        found = Rank(device, chunk_size)
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


def test_the_host_does_not_wait_while_chunks_are_copied():
    """No copy blocks the host, and gradients stay the same tensors."""
    with rank(2) as one:
        for _ in range(2):
            one.begin()
            one.make_all()
            gradients = [parameter.grad for parameter in one.parameters]
            before = one.device.num_blocking_copies
            one.send_all()
            one.finish()
            assert one.device.num_blocking_copies == before
            assert one.is_right()
            for parameter, gradient in zip(one.parameters, gradients, strict=True):
                assert parameter.grad is gradient


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
        for chunk in others:
            one.send(chunk)
        assert gradient._version == version
        one.finish()
        assert (read == 10.0).all().item()
        assert one.is_right()


def test_a_gradient_that_changed_on_no_rank_is_not_modified():
    with rank(1) as one:
        one.begin()
        one.arena.flags[0, 1, one.step % 2] = 0
        one.make_all()
        one.send_all()
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
        for chunk in one.chunks[:sent]:
            one.send(chunk)
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
        one.make_all()
        one.send_all()  # copies of 1, 2, ..., 5 times LONG_S
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


def test_a_model_on_several_devices_is_refused():
    one, other = devices(2)
    parameters = [nn.Parameter(torch.ones(2, device=on.torch_device)) for on in (one, other)]
    named = [NamedParameter(name, name, p) for name, p in zip("ab", parameters, strict=True)]
    exchange = HostExchange(Group.alone(one.torch_device, DEADLINE_S))
    with refused("model"):
        exchange.open(Layout.of(named, [0, 1]))


def test_memory_that_cannot_be_pinned_is_refused_with_the_worker(monkeypatch):
    (device,) = devices(1)
    made = nn.Parameter(torch.ones(2, device=device.torch_device))
    layout = Layout.of([NamedParameter("a", "a", made)], [0])
    exchange = HostExchange(Group.alone(device.torch_device, DEADLINE_S))
    exchange.open(layout)
    exchange.close()

    def fails(memory):
        raise InvalidInput("device", f"{memory.nbytes} bytes of host memory cannot be pinned")

    monkeypatch.setattr(device, "pin", fails)
    with refused("worker 0"):
        HostExchange(Group.alone(device.torch_device, DEADLINE_S)).open(layout)
