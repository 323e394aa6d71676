"""The simulated device is asynchronous like CUDA, and raises errors for undefined behaviour."""

import copy
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from simulated_gpu.device import RaceError, SimulatedDevice
from simulated_gpu.lent import simulated_gpus

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


def test_writing_memory_while_another_stream_reads_it_is_an_error(device):
    there, beside = ones(device), device.new_stream()
    beside.wait_stream(device.current_stream())
    with device.use(beside):
        found = there + 1
    with pytest.raises(RaceError):
        there.zero_()
    assert found is not None


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


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_in_a_checkpoint_repeats_dropout(device, use_reentrant):
    """A checkpoint saves and restores the random state that dropout uses."""
    weight = nn.Parameter(torch.ones(64, device=device.torch_device))
    kept = []

    def part(values: Tensor) -> Tensor:
        kept.append(nn.functional.dropout(values * weight, 0.5))
        return kept[-1]

    inputs = torch.ones(64, device=device.torch_device, requires_grad=True)
    checkpoint(part, inputs, use_reentrant=use_reentrant).sum().backward()
    assert kept[0].tolist() == weight.grad.tolist()
    assert set(weight.grad.tolist()) == {0.0, 2.0}


def test_a_deep_copy_shares_no_memory(device):
    model = nn.Linear(4, 4, device=device.torch_device)
    with torch.no_grad():
        for parameter in copy.deepcopy(model).parameters():
            assert isinstance(parameter, nn.Parameter)
            parameter.zero_()
    assert any(parameter.abs().sum().item() for parameter in model.parameters())


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
        st.integers(0, 3),  # the block to write
        st.integers(0, 3),  # the block to read
        st.sampled_from([None, 0, 1, 2]),  # a stream to wait for first
    ),
    max_size=14,
)


@given(STEPS, st.lists(st.sampled_from([0.0, 2e-4, 2e-3]), min_size=3, max_size=3))
def test_programs_without_races_have_the_same_result_for_any_delays(steps, delays):
    """The result of a program with three streams equals the result without streams."""
    with simulated_gpus(may_fail=True) as (device,), suppress(RaceError):
        streams = [device.new_stream() for _ in range(3)]
        numbers = [stream.number for stream in streams]
        blocks = [torch.full((4,), float(value), device=device.torch_device) for value in range(4)]
        expected = [float(value) for value in range(4)]
        device.synchronize()
        device.delays = lambda stream, what: (
            delays[numbers.index(stream.number)] if stream.number in numbers else 0.0
        )
        for stream, target, source, awaited in steps:
            if awaited is not None:
                streams[stream].wait_stream(streams[awaited])
            with device.use(streams[stream]):
                blocks[target].mul_(0.5).add_(blocks[source])
            expected[target] = expected[target] * 0.5
            expected[target] += expected[source]
        device.synchronize()  # ends here after a race
        assert [block[0].item() for block in blocks] == expected
