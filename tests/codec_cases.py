"""Difficult values for codecs, and a comparison of codecs on two devices."""

import torch
from torch import Tensor

from paceline.codecs import quantization
from paceline.codecs.codec import Codec, Payload

SCALES = (1.0, 1e-3, 0.7, 3.1e9, 1e-37, 3e38)


def bin_edges(one: quantization.QuantizationTable, scale: float) -> Tensor:
    """Return thresholds and magnitudes of a table with their neighbours, times a scale."""
    edges = torch.cat([one.thresholds, one.magnitudes])
    near = [edges, edges.nextafter(torch.tensor(2.0)), edges.nextafter(torch.tensor(0.0))]
    scaled = torch.cat(near) * scale
    around = [scaled, scaled.nextafter(torch.tensor(torch.inf)), scaled.nextafter(torch.tensor(0))]
    return torch.cat([*around, *(-values for values in around)])


def sixteen_bits(dtype: torch.dtype) -> Tensor:
    """Return all values of a 16-bit type, including denormals, zeros, infinities and NaNs."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).float()


def denormals() -> Tensor:
    """Return zero and many float32 denormals, including the smallest."""
    small = torch.arange(-5000, 5000, dtype=torch.int32)
    bits = torch.cat([small.abs() << shift for shift in (0, 5, 10)])
    return torch.where(small.repeat(3) < 0, -1.0, 1.0) * bits.view(torch.float32)


def normal(count: int, seed: int = 0) -> Tensor:
    """Return normally distributed values."""
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def facts(payload: Payload) -> tuple[object, ...]:
    """Return the contents of a payload on any device."""
    buffers = [buffer.tolist() for buffer in payload.buffers]
    return payload.codec, payload.count, payload.num_nonfinite, buffers


def check_on_device(here: Codec, there: Codec, values: Tensor, moved: Tensor) -> None:
    """Compare payloads, decoded values, and sums with decoded values, bit by bit."""
    payload, other = here.encode(values), there.encode(moved)
    assert all(buffer.device == moved.device for buffer in other.buffers)
    assert facts(other) == facts(payload)
    assert torch.equal(there.decode(other).cpu(), here.decode(payload))
    total = normal(values.numel(), 1)
    summed = total.to(moved.device)
    here.add_to(total, payload)
    there.add_to(summed, other)
    assert torch.equal(summed.cpu(), total)
