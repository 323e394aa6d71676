"""What a rank computes and encodes on: how fast layers are, and codecs."""

from functools import partial
from operator import sub
from statistics import median

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from paceline.codecs.names import find_codec
from paceline.core.wire_format import Kernel
from paceline.exchange.compressed import CompressedAllReduce
from paceline.probe.sample import Run, Sampler, Spread, idle

CONVOLUTION = "conv2d of 256 to 384 channels, 3x3 on 13x13"  # AlexNet's third
LINEAR = "linear layer of 2048 to 2048"
_CALLS = 200
_NUM_VALUES = 1 << 21
_NUM_FEW_VALUES = 256
# Codecs of one kernel are equally fast; where they are torch's own operations, nearly so.
_CODECS: dict[Kernel, tuple[str, ...]] = {
    "eightbit": ("dynamic8",),
    "cast": ("half", "bfloat16"),
    "onebit": ("onebit",),
}


class CodecFigures(BaseModel):
    """Values a second of the codecs of a kernel; decoding counts what is added to others, too."""

    model_config = ConfigDict(frozen=True)

    encode: Spread
    decode: Spread


class DeviceFigures(BaseModel):
    """What a rank's device reached beside those of the other ranks.

    `convolution` and `linear` are flops a second of layers that are trained, forward and backward;
    `traffic` is bytes a second of an operation whose result is new; `call_s` an operation's seconds
    on one value.
    """

    model_config = ConfigDict(frozen=True)

    convolution: Spread
    linear: Spread
    traffic: Spread
    call_s: Spread
    codecs: dict[Kernel, CodecFigures]

    @property
    def flops_per_s(self) -> float:
        """Return the speed at which half of the arithmetic is the convolution's."""
        return 2 / (1 / self.convolution.median + 1 / self.linear.median)


def measure_device(sampler: Sampler, device: torch.device) -> DeviceFigures:
    """Measure this rank's device, beside the other ranks, which do the same."""
    large = 8 if device.type == "cuda" else 1
    numel = (1 << 24) * (4 if device.type == "cuda" else 1)
    return DeviceFigures(
        convolution=_convolution(sampler, device, 8 * large),
        linear=_linear(sampler, device, 256 * large),
        traffic=_traffic(sampler, device, numel),
        call_s=_call(sampler, device),
        codecs=measure_codecs(sampler, device),
    )


def _convolution(sampler: Sampler, device: torch.device, batch_size: int) -> Spread:
    layer = nn.Conv2d(256, 384, 3, padding=1).to(device)
    inputs = torch.randn(batch_size, 256, 13, 13, device=device)
    flops = 2 * batch_size * 13 * 13 * 384 * 256 * 9
    return _trained(sampler, layer, inputs, flops)


def _linear(sampler: Sampler, device: torch.device, batch_size: int) -> Spread:
    layer = nn.Linear(2048, 2048).to(device)
    inputs = torch.randn(batch_size, 2048, device=device)
    return _trained(sampler, layer, inputs, 2 * batch_size * 2048 * 2048)


def _trained(sampler: Sampler, layer: nn.Module, inputs: Tensor, flops: int) -> Spread:
    """Return the flops a second of forward, and of backward, which has twice as many."""
    sources = [inputs.requires_grad_(), *layer.parameters()]
    gradient = torch.ones_like(layer(inputs))
    seconds = sampler.seconds(lambda: torch.autograd.grad(layer(inputs), sources, gradient))
    return Spread.rate(3 * flops, seconds)


def _traffic(sampler: Sampler, device: torch.device, numel: int) -> Spread:
    values = torch.ones(numel, device=device)
    return Spread.rate(2 * 4 * numel, sampler.seconds(lambda: torch.mul(values, 2.0)))


def _call(sampler: Sampler, device: torch.device) -> Spread:
    value = torch.ones(1, device=device)

    def calls() -> None:
        for _ in range(_CALLS):
            torch.add(value, value)

    return Spread.of([seconds / _CALLS for seconds in sampler.seconds(calls)])


def measure_codecs(
    sampler: Sampler, device: torch.device, is_measured: bool = True
) -> dict[Kernel, CodecFigures]:
    """Measure all kernels on a device; a rank that is not measured only waits for the others."""
    values = torch.randn(_NUM_VALUES, device=device)
    return {
        kernel: _codec(sampler, names, values, is_measured) for kernel, names in _CODECS.items()
    }


def _codec(
    sampler: Sampler, names: tuple[str, ...], values: Tensor, is_measured: bool
) -> CodecFigures:
    codecs = [find_codec(name) for name in names]
    encoded = [(codec, codec.encode(values)) for codec in codecs]
    total = torch.zeros_like(values)

    def encode() -> None:
        for codec in codecs:
            codec.encode(values)

    def decode() -> None:
        for codec, payload in encoded:
            codec.decode(payload, total)
            codec.add_to(total, payload)

    def rate(run: Run, num_times: int) -> Spread:
        seconds = sampler.seconds(run if is_measured else idle)
        return Spread.rate(num_times * len(codecs) * len(values), seconds)

    return CodecFigures(encode=rate(encode, 1), decode=rate(decode, 2))


def measure_codec_latencies(sampler: Sampler, deadline_s: float) -> dict[Kernel, float]:
    """Measure by half of how much an all-reduce of few values takes longer with a codec.

    There are two ranks or more.
    """
    group = sampler.group
    all_reduce = CompressedAllReduce(range(group.world_size), group.device, deadline_s)
    values = torch.zeros(_NUM_FEW_VALUES, device=group.device)

    def plain() -> None:
        dist.all_reduce(values)
        _finish(group.device)

    def encoded(name: str) -> None:
        factory = partial(find_codec, name)
        all_reduce.begin(name, values, factory).future.wait()
        _finish(group.device)

    runs: list[Run] = [plain, *(partial(encoded, names[0]) for names in _CODECS.values())]
    without, *with_codecs = sampler.of_last(runs, range(group.world_size))
    latencies = {
        kernel: max(0.0, median(map(sub, seconds, without)) / 2)
        for kernel, seconds in zip(_CODECS, with_codecs, strict=True)
    }
    all_reduce.close()
    return latencies


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
