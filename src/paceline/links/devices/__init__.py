"""The devices of this process, with one small interface (`Device`) for CPU and GPUs.

    device = device_of(tensor.device)
    with device.use(copies):                        # copies: a stream of the device
        target.copy_(source, non_blocking=True)
        copied = device.record()                    # an event after the copy
    device.current_stream().wait_event(copied)

Supported devices are the CPU and NVIDIA's GPUs; tests add a simulated GPU.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

import torch

from paceline.core.errors import InvalidInput, first_line
from paceline.links.devices import cuda
from paceline.links.devices.device import Device as Device


def device_of(device: torch.device) -> Device:
    """Return the `Device` of a torch device; raise InvalidInput unless it is CPU or CUDA."""
    return _device_of(current_gpu() if device == torch.device("cuda") else device)


@cache
def _device_of(device: torch.device) -> Device:
    if device.type == "cpu":
        return Device(device)
    if device.type == "cuda":
        return cuda.CudaDevice(device)
    raise InvalidInput("device", "must be 'cpu' or 'cuda'", got=str(device))


def gpus() -> tuple[torch.device, ...]:
    """Return the GPUs that this process sees; initialises CUDA.

    Raises InvalidInput if GPUs exist but are not usable, for example because of an old driver:
    otherwise, training would silently run on CPU cores.
    """
    return cuda.found_gpus(usable=True)


def first_device() -> torch.device:
    """Return the first GPU of `gpus()`, or the CPU if there is no GPU."""
    return next(iter(gpus()), torch.device("cpu"))


def device_named(name: str) -> torch.device:
    """Return the torch device named "cpu", "cuda:0" or similar; InvalidInput if not usable."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, IndexError) as error:
        raise InvalidInput("device", f"cannot be used: {first_line(error)}", got=name) from None
    return device_of(device).torch_device


def current_gpu() -> torch.device:
    """Return this thread's current NVIDIA GPU."""
    return torch.device("cuda", torch.cuda.current_device())


def num_gpus() -> int:
    """Return the number of GPUs that this process's children see, without initialising CUDA.

    After CUDA is initialised, forks cannot use GPUs. Raises InvalidInput if GPUs exist but PyTorch
    finds none. Unlike `gpus`, does not detect an old driver.
    """
    return len(cuda.found_gpus(usable=False))


@contextmanager
def random_numbers_restored(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore the CPU's and these devices' random number generators after the block."""
    with torch.random.fork_rng(devices=[]), ExitStack() as stack:
        for device in map(device_of, devices):
            if (state := device.random_state()) is not None:
                stack.callback(device.set_random_state, state)
        yield
