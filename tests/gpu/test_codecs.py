"""8-bit and 4-bit codecs on a GPU, by Triton and by PyTorch, have the bits of the CPU."""

import pytest
import torch

import codec_cases as cases
from kernel_contract import KernelContract
from paceline.codecs import kernels
from paceline.codecs.blockwise import EightBit, FourBit
from paceline.codecs.codec import Codec
from paceline.codecs.quantization import FOUR_BIT_TABLES, TABLES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
needs_triton = pytest.mark.skipif(
    not kernels._triton_compiles(), reason="Triton or a C compiler is not installed"
)
GIB = 2**30


@needs_triton
class TestKernels(KernelContract):
    on = "cuda"


@needs_triton
def test_places_beyond_32_bits():
    """With 32-bit indices, the last values would overwrite the first ones."""
    if torch.cuda.mem_get_info()[0] < 24 * GIB:
        pytest.skip("the GPU has less than 24 GiB free")
    begin, end = 2**31, cases.normal(5000)
    codec, values = EightBit("dynamic8"), torch.zeros(begin + len(end), device="cuda")
    values[begin:] = end
    payload, alone = codec.encode(values), codec.encode(end)
    codes = payload.buffers[1]
    assert torch.equal(codes[begin:].cpu(), alone.buffers[1])
    assert not codes[:begin].any()
    assert torch.equal(codec.decode(payload)[begin:].cpu(), codec.decode(alone))


@pytest.mark.parametrize("with_triton", [False, pytest.param(True, marks=needs_triton)])
@pytest.mark.parametrize(
    "codec",
    [
        *(EightBit(name, block_size=1000, offset=at) for name in TABLES for at in (None, 10.0)),
        *(FourBit(name, block_size=1000) for name in FOUR_BIT_TABLES),
    ],
)
def test_payloads_are_those_of_the_cpu(monkeypatch, with_triton: bool, codec: Codec):
    """Test Triton's kernels, and PyTorch's functions as without Triton."""
    monkeypatch.setattr(kernels, "_triton_compiles", lambda: with_triton)
    values = cases.normal(100_001)
    values[[5, 77]] = torch.nan
    cases.check_on_device(codec, codec, values, values.cuda())


@needs_triton
def test_kernels_run_on_the_current_stream():
    """The current stream is busy, so kernels on another stream would read too early."""
    stream, codec = torch.cuda.Stream(), EightBit("linear8")
    expected = codec.encode(cases.normal(5000))
    values, meant = torch.zeros(5000, device="cuda"), cases.normal(5000).cuda()
    codec.decode(codec.encode(values))  # compiles
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        values.copy_(meant)
        found = codec.encode(values)
    assert cases.facts(found) == cases.facts(expected)
