"""Devices of this process: what may be done with them, behind one small protocol.

    device = device_of(tensor.device)
    copies = device.new_stream()
    copies.wait_stream(device.current_stream())
    with device.use(copies):
        there.copy_(here, non_blocking=True)
    device.current_stream().wait(copies.record())

Two kinds: the host's cores, and NVIDIA's GPUs. Tests bring a third one, a simulated GPU, with which
all of that runs on a machine without one.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

import torch

from paceline.core.errors import InvalidInput
from paceline.links.devices.device import Device as Device
from paceline.links.devices.device import Event as Event
from paceline.links.devices.device import Stream as Stream


def device_of(device: torch.device) -> Device:
    """Return what can be done with a device of torch's. InvalidInput if it is of another kind."""
    return _device_of(current_gpu() if device == torch.device("cuda") else device)


@cache
def _device_of(device: torch.device) -> Device:
    if device.type == "cpu":
        from paceline.links.devices.host import HostDevice

        return HostDevice(device)
    if device.type == "cuda":
        from paceline.links.devices.cuda import CudaDevice

        return CudaDevice(device)
    raise InvalidInput(
        "device",
        f"{str(device)!r} is of a kind that is not known here",
        hint="take 'cpu' or 'cuda'",
    )


def gpus() -> tuple[torch.device, ...]:
    """Return the GPUs that this process sees; asking initialises CUDA.

    Raises InvalidInput if there are some that cannot be used, as with a driver that is too old: to
    compute on cores instead would be slow without a word.
    """
    from paceline.links.devices import cuda

    return cuda.gpus()


def first_device() -> torch.device:
    """Return the first GPU that this process sees, or the CPU where there is none.

    Raises InvalidInput if there are some that cannot be used.
    """
    return next(iter(gpus()), torch.device("cpu"))


def device_named(name: str) -> torch.device:
    """Return the device of a name, such as cpu or cuda:0; InvalidInput if it cannot be used."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, IndexError) as error:
        first = str(error).splitlines()[0]
        raise InvalidInput("device", f"{name!r} cannot be used: {first}") from None
    return device_of(device).torch_device


def current_gpu() -> torch.device:
    """Return the one of NVIDIA's GPUs that is this thread's current one."""
    return torch.device("cuda", torch.cuda.current_device())


def num_gpus() -> int:
    """Return the number of GPUs that processes see which are started from here.

    Where the driver can count them without it, CUDA stays uninitialised: a process that has
    initialised it cannot fork others that use it. So a driver that is too old is found by `gpus`
    alone; InvalidInput if torch finds none of the GPUs that there are.
    """
    from paceline.links.devices import cuda

    return cuda.num_gpus()


def can_compute_in_fork() -> bool:
    """Return True, in a process that was forked, if it can compute on all of its devices.

    It cannot if the one that forked it has initialised CUDA; nor, where there are GPUs, if that one
    has gone through a backward pass, which started a thread for each.
    """
    from paceline.links.devices import cuda

    if cuda.is_lost():
        return False
    try:
        torch.ones(1, requires_grad=True).sum().backward()
    except RuntimeError:
        return False
    return True


@contextmanager
def random_numbers_restored(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore the states of torch's random number generators afterwards, of these devices too."""
    with torch.random.fork_rng(devices=[]), ExitStack() as stack:
        for device in map(device_of, devices):
            if (state := device.random_state()) is not None:
                stack.callback(device.set_random_state, state)
        yield
