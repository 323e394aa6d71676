"""Measure how fast a device computes, encodes and copies, and how fast a host sums.

Functions with a parameter `sampler` are collective: all ranks measure at the same time.
"""

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from paceline.codecs.names import find_codec
from paceline.codecs.stand_ins import stand_ins_for
from paceline.core.wire_format import Kernel
from paceline.links.arena import Arena
from paceline.links.devices import device_of
from paceline.links.shared_memory import LocalRanks
from paceline.measure.this_machine import memory_bytes
from paceline.measure.timing import Sampler, Spread, idle, median_s

CONVOLUTION = "conv2d of 256 to 384 channels, 3x3 on 13x13"  # AlexNet's third convolution
LINEAR = "linear layer of 2048 to 2048"
_CALLS = 200
_NUM_VALUES = 1 << 21
_NUM_VALUES_ALONE = 1 << 18
_COPIED_VALUES = 1 << 22
_NUM_SUMMED = 64
_COPY_NBYTES = 128 * 2**20
_SHARE_OF_MEMORY = 16  # copies of all ranks together use at most a 16th of the host's memory
# Codecs to measure for each kernel. A kernel is code that several equally fast codecs share.
CODECS: dict[Kernel, tuple[str, ...]] = {
    "eightbit": ("dynamic8",),
    "fourbit": ("e3m0",),
    "cast": ("half", "bfloat16"),
    "onebit": ("onebit",),
    # The speed depends on the share of values that is sent. Measure 1 %, as in Strom 2015.
    "threshold": ("threshold:1@0.01",),
}


class CodecFigures(BaseModel, frozen=True):
    """The speed of the codecs that share a kernel (encoding code), in values per second.

    `decode`: the mean speed of overwriting a tensor with decoded values, and of adding them to it.
    """

    encode: Spread
    decode: Spread


class DeviceFigures(BaseModel, frozen=True):
    """The speeds of a rank's device while all ranks measure.

    `convolution`, `linear`: flops per second of the layer's forward and backward pass. `traffic`:
    bytes per second that an elementwise operation reads and writes. `call_s`: seconds that an
    operation on a tensor of one value takes.
    """

    convolution: Spread
    linear: Spread
    traffic: Spread
    call_s: Spread
    codecs: dict[Kernel, CodecFigures]

    @property
    def flops_per_s(self) -> float:
        """Flops per second of a model with equal flops in convolutions and in linear layers."""
        return 2 / (1 / self.convolution.median + 1 / self.linear.median)


def measure_device(sampler: Sampler, device: torch.device) -> DeviceFigures:
    """Measure this rank's device, while the other ranks measure theirs."""
    # Use large layers on a GPU: kernel launches would dominate the time of small layers.
    is_large = device_of(device).memory_nbytes() is not None
    num_images, num_rows, numel = (64, 2048, 1 << 26) if is_large else (8, 256, 1 << 24)
    value = torch.ones(1, device=device)

    def trained(layer: nn.Module, shape: tuple[int, ...], flops: int) -> Spread:
        """Return the flops per second of a layer: `flops` in forward, 2 * `flops` in backward."""
        inputs = torch.randn(shape, device=device, requires_grad=True)
        sources = [inputs, *layer.to(device).parameters()]
        gradient = torch.ones_like(layer(inputs))
        seconds = sampler.seconds(lambda: torch.autograd.grad(layer(inputs), sources, gradient))
        return Spread.rate(3 * flops, seconds)

    def calls() -> None:
        for _ in range(_CALLS):
            torch.add(value, value)

    convolution, images = nn.Conv2d(256, 384, 3, padding=1), (num_images, 256, 13, 13)
    values = torch.ones(numel, device=device)
    return DeviceFigures(
        convolution=trained(convolution, images, 2 * num_images * 13 * 13 * 384 * 256 * 9),
        linear=trained(nn.Linear(2048, 2048), (num_rows, 2048), 2 * num_rows * 2048 * 2048),
        traffic=Spread.rate(2 * values.nbytes, sampler.seconds(lambda: torch.mul(values, 2.0))),
        call_s=Spread.of([seconds / _CALLS for seconds in sampler.seconds(calls)]),
        codecs=measure_codecs(sampler, device),
    )


def measure_codecs(
    sampler: Sampler, device: torch.device, is_measured: bool = True
) -> dict[Kernel, CodecFigures]:
    """Measure codecs on the ranks where `is_measured` is True; others wait; collective."""
    total = torch.zeros(_NUM_VALUES, device=device)

    def figures(names: tuple[str, ...]) -> CodecFigures:
        codecs = [find_codec(name) for name in names]
        values = _values(names[0], total)
        encoded = [(codec, codec.encode(values)) for codec in codecs]

        def encode() -> None:
            for codec in codecs:
                codec.encode(values)

        def decode() -> None:
            for codec, payload in encoded:
                codec.decode(payload, total)
                codec.add_to(total, payload)

        encode_s, decode_s = (
            sampler.seconds(work if is_measured else idle) for work in (encode, decode)
        )
        num_values = len(codecs) * len(values)
        return CodecFigures(
            encode=Spread.rate(num_values, encode_s), decode=Spread.rate(2 * num_values, decode_s)
        )

    return {kernel: figures(names) for kernel, names in CODECS.items()}


def measure_copies(sampler: Sampler, place: LocalRanks) -> Spread:
    """Return the speed of this rank's copies in host memory, in bytes read and written per second.

    All ranks of a host copy at once, so their speeds add up to the host's memory bandwidth.
    """
    nbytes = min(_COPY_NBYTES, memory_bytes() // _SHARE_OF_MEMORY // len(place.members))
    source, target = torch.ones(nbytes // 4), torch.ones(nbytes // 4)
    return Spread.rate(2 * source.nbytes, sampler.seconds(lambda: target.copy_(source)))


def measure_sums(sampler: Sampler) -> Spread:
    """Return the seconds that the ranks of a host (two or more) take to sum a few values."""
    group = sampler.group
    arena = Arena(group, 4 * _NUM_SUMMED, 1, 0, group.deadline_s, scale=1.0, held=False)
    arena.slot.zero_()
    arena.set_chunks([[(0, _NUM_SUMMED, torch.float32)]])
    step = 0

    def once() -> None:
        nonlocal step
        step += 1
        arena.begin(step)
        arena.post(0)
        arena.commit()
        arena.wait_step()

    spread = Spread.of(sampler.seconds(once))
    arena.close()
    return spread


def _values(codec: str, like: Tensor) -> Tensor:
    """Return test values; a codec whose name declares a share sends this share of them."""
    return (stand_ins_for(codec) or torch.randn_like)(like)


def codec_speed(name: str, num_values: int = _NUM_VALUES_ALONE) -> tuple[float, float]:
    """Return the values per second that this process encodes and decodes on the CPU.

    Includes the time for allocating the results, whose memory the system provides page by page.
    """
    codec, values = find_codec(name), _values(name, torch.empty(num_values))
    payload = codec.encode(values)
    encode_s = median_s(lambda: codec.encode(values))
    decode_s = median_s(lambda: codec.decode(payload))
    return len(values) / encode_s, len(values) / decode_s


def copy_speed(device: torch.device) -> float:
    """Return the bytes per second of copies from a GPU to pageable memory."""
    values = torch.zeros(_COPIED_VALUES, device=device)
    values.cpu()
    return values.nbytes / median_s(values.cpu)
