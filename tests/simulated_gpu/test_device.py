"""The simulated device is asynchronous like CUDA, and raises errors for undefined behaviour."""

import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from simulated_gpu.device import RaceError, SimulatedDevice
from simulated_gpu.lent import simulated_gpus
from simulated_gpu.ordering import Access, Block, merge

LONG_S = 0.05  # longer than a call that queues work


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    """Yield a simulated device whose work may fail."""
    with simulated_gpus(may_fail=True) as (found,):
        yield found


def slow(device: SimulatedDevice) -> None:
    device.delays = lambda stream, what: LONG_S


def ones(device: SimulatedDevice) -> Tensor:
    return torch.ones(8, device=device.torch_device)


def test_a_call_returns_before_its_work_is_done(device):
    slow(device)
    there, here = ones(device), device.pinned_like(torch.empty(8))
    here.copy_(there, non_blocking=True)
    event = device.current_stream().record()
    assert here.isnan().all()
    assert not device.has_arrived(here)
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert device.has_arrived(here)
    assert torch.equal(here, torch.ones(8))


@pytest.mark.parametrize("why", ["not pinned", "another layout"])
def test_some_copies_make_the_host_wait(device, why):
    slow(device)
    there, here = torch.ones(2, 4, device=device.torch_device), torch.zeros(2, 4)
    if why == "another layout":
        there, here = there.t(), device.pinned_like(torch.empty(4, 2))
    before = device.num_blocking_copies
    here.copy_(there, non_blocking=True)
    assert (here == 1).all()
    assert device.num_blocking_copies == before + 1


def copied(device: SimulatedDevice, there: Tensor) -> None:
    device.pinned_like(torch.empty(8)).copy_(there, non_blocking=True)


@pytest.mark.parametrize(
    "read",
    [
        lambda device, there: there + 1,
        lambda device, there: there.add_(1),
        copied,
        lambda device, there: there[0].item(),  # the host reads the value
    ],
    ids=["computing", "writing", "copying", "the host"],
)
@pytest.mark.parametrize("is_done", [False, True])
def test_using_memory_before_another_stream_has_written_it_is_an_error(device, read, is_done):
    """It is an error even if the write happens to be done already."""
    there, beside = ones(device), device.new_stream()
    if is_done:
        assert device.current_stream().record().reached.wait(60)  # does not synchronize
    with device.use(beside), pytest.raises(RaceError):
        read(device, there)


def test_values_from_the_host_belong_to_the_current_stream(device):
    there, beside = ones(device), device.new_stream()
    device.synchronize()
    there.normal_()  # the host generates random numbers
    with device.use(beside), pytest.raises(RaceError):
        there + 1


def test_an_event_orders_only_work_queued_before_it(device):
    own, beside = device.current_stream(), device.new_stream()
    first = ones(device)
    event = own.record()
    second = ones(device)
    beside.wait_event(event)
    with device.use(beside):
        first.add_(1)
        with pytest.raises(RaceError):
            second.add_(1)


def test_using_disjoint_parts_of_the_same_memory_is_no_race(device):
    there, beside = ones(device), device.new_stream()
    beside.wait_stream(device.current_stream())
    with device.use(beside):
        there[:4].add_(1)
    there[4:].add_(2)
    with pytest.raises(RaceError):
        there[3:].add_(2)


@pytest.mark.parametrize("keeps", [False, True])
def test_freeing_memory_too_early_is_an_error(device, keeps):
    slow(device)
    there, beside = ones(device), device.new_stream()
    beside.wait_stream(device.current_stream())
    with device.use(beside):
        found = there + 1
        if keeps:
            beside.keep(there)
        del there
    device.current_stream().wait_stream(beside)
    if keeps:
        assert found.sum().item() == 16
    else:
        with pytest.raises(RaceError):
            found.sum().item()


def test_unpinning_memory_during_a_copy_is_an_error(device):
    slow(device)
    here, there = torch.zeros(8), ones(device)
    unpin = device.pin(here)
    here.copy_(there, non_blocking=True)
    with pytest.raises(RaceError):
        unpin()


def test_an_error_on_the_device_is_raised_when_the_host_waits(device):
    places = torch.tensor([99]).to(device.torch_device)
    ones(device)[places]
    with pytest.raises(IndexError):
        device.synchronize()


def test_hooks_run_in_a_thread_of_the_device(device):
    weight = nn.Parameter(ones(device))
    threads = []
    weight.register_post_accumulate_grad_hook(lambda _: threads.append(threading.get_ident()))
    (weight * 2).sum().backward()
    assert threads
    assert threads[0] != threading.get_ident()


def test_foreach_copies_lists_of_several_dtypes_or_layouts_tensor_by_tensor(device):
    """The simulated device counts kernels as torch on CUDA, which copies 64 pairs per launch."""
    on = device.torch_device
    same = [torch.ones(4, 3).to(on) for _ in range(65)]
    mixed = [*same[:2], torch.ones(3).half().to(on)]
    turned = [*same[:2], torch.ones(3, 4).to(on).t()]
    for tensors, count in ((same[:64], 1), (same, 2), (mixed, 3), (turned, 3)):
        targets = [torch.empty(one.size(), dtype=one.dtype, device=on) for one in tensors]
        device.commands.clear()
        torch._foreach_copy_(targets, tensors)
        assert device.commands["kernel"] == count


STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),  # the stream
        st.integers(0, 1),  # the first byte
        st.integers(1, 2),  # the number of bytes
        st.booleans(),  # whether the stream writes them
        st.integers(0, 2),  # the stream to wait for first
    )
)


@given(STEPS)
@settings(max_examples=300)
def test_a_block_finds_the_races_of_all_pairs_of_accesses(steps):
    """It forgets accesses that cannot race with later ones."""
    block, every, clocks = Block(), [], [{}, {}, {}]
    for stream, start, count, writes, awaited in steps:
        clock = clocks[stream]
        merge(clock, clocks[awaited])
        clock[stream] = clock.get(stream, 0) + 1
        access = Access(start, start + count, stream, clock[stream], writes, "work")
        races = any(
            max(start, other.start) < min(access.end, other.end)
            and (writes or other.writes)
            and other.position > clock.get(other.stream, 0)
            for other in every
        )
        assert (block.race(access, clock) is not None) == races
        if not races:
            block.add(access, clock)
            every.append(access)
