"""`describe` on transformers: costs by hand, fused attention on meta tensors, and kept memory.

B: samples. T: tokens of a sample. R = B T. C: width. H: number of heads. V: vocabulary size.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.training.models import describe
from paceline.training.models.fused_attention import attention_as_on_cpu
from paceline.training.models.transformers import GPT

B, T, C, H, V = 3, 10, 12, 2, 17
R = B * T
TOKENS = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(0))


def linear(inputs: int, outputs: int, bias: bool = True) -> tuple[int, int]:
    """Return the FLOPs of forward (a product) and backward (two, and the sum for the bias)."""
    product = 2 * R * inputs * outputs
    return product, 2 * product + bias * R * outputs


def plus(one: tuple[int, int], forward: int, backward: int) -> tuple[int, int]:
    return one[0] + forward, one[1] + backward


@pytest.mark.parametrize("tied", [True, False])
def test_flops_of_gpt_equal_counts_by_hand(tied: bool) -> None:
    values, scores = R * C, 2 * R * T * C
    norm, logits = (8 * values, 13 * values), linear(C, V, bias=False)
    block = {
        # After a norm's backward, the gradients of both residual branches are added.
        "norm1": plus(norm, 0, values),
        # A causal mask saves nothing: the CPU kernel skips only whole blocks of 512 keys.
        "attention.qkv": plus(linear(C, 3 * C), 2 * scores, 5 * scores),
        "attention.output": plus(linear(C, C), values, 0),
        "norm2": plus(norm, 0, values),
        "feed_forward.hidden": plus(linear(C, 4 * C), 13 * 4 * values, 22 * 4 * values),  # GELU
        "feed_forward.output": plus(linear(4 * C, C), values, 0),
    }
    by_hand = {
        "embedding.tokens": (0, values + (V * C if tied else 0)),  # sums both gradients
        "embedding.positions": (values, values + T * C),
        **{f"blocks.{n}.{name}": costs for n in range(2) for name, costs in block.items()},
        # With tied weights, the output layer has no parameter, so `norm` has its costs.
        "norm": plus(norm, *logits) if tied else norm,
        **({} if tied else {"head": logits}),
    }
    model = GPT(V, context=14, width=C, num_layers=2, num_heads=H, tied=tied)
    layers = describe(model, TOKENS).layers
    assert {one.name: (one.forward.flops, one.backward.flops) for one in layers} == by_hand


FUSED = "_scaled_dot_product_flash_attention_for_cpu"
Made = tuple[str, list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]]


class Operations(TorchDispatchMode):
    """Records each operation with the shapes, strides and types of its results."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Made] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        several = result if isinstance(result, tuple | list) else [result]
        tensors = [(tuple(t.shape), t.stride(), t.dtype) for t in several if isinstance(t, Tensor)]
        self.made.append((func.overloadpacket.__name__, tensors))
        return result


def attended(
    device: str,
    *,
    mask: Tensor | None = None,
    dims: int = 4,
    heads: int = 6,
    value_depth: int = 4,
    dtype: torch.dtype = torch.float32,
    strided: bool = False,
    **options: Any,
) -> list[Made]:
    q, k, v = (
        torch.zeros(2, count, 5, depth, device=device, dtype=dtype, requires_grad=True)
        for count, depth in ((6, 4), (heads, 4), (heads, value_depth))
    )
    if dims == 3:
        q, k, v = q[0], k[0], v[0]
    if strided:  # the last dimension is not dense
        q = torch.zeros(2, 6, 4, 5, device=device, requires_grad=True).transpose(2, 3)
    if mask is not None:
        mask = mask.to(device).detach().requires_grad_(mask.requires_grad)
    with Operations() as operations:
        result = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
        result.backward(torch.ones_like(result))
    return operations.made


CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "plain": (True, {}),
    "causal": (True, {"is_causal": True}),
    "scaled": (True, {"scale": 0.3}),
    "bool mask": (True, {"mask": torch.ones(2, 1, 1, 5, dtype=torch.bool)}),
    "float mask": (True, {"mask": torch.zeros(5, 5)}),
    "bfloat16": (True, {"dtype": torch.bfloat16, "is_causal": True}),
    "float64": (True, {"dtype": torch.float64}),
    "grouped heads": (True, {"heads": 3, "enable_gqa": True, "is_causal": True}),
    "trained mask": (False, {"mask": torch.zeros(5, 5, requires_grad=True)}),
    "three dimensions": (False, {"dims": 3}),
    "other depth of values": (False, {"value_depth": 8}),
    "strided": (False, {"strided": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_meta_runs_the_operations_of_the_cpu(case: str) -> None:
    is_fused, options = CASES[case]
    real = attended("cpu", **options)
    with attention_as_on_cpu():
        meta = attended("meta", **options)
    assert meta == real
    assert (FUSED in [name for name, _ in real]) is is_fused


def test_attention_with_dropout_and_after_the_context_is_unchanged() -> None:
    before = attended("meta")
    with pytest.raises(KeyError), attention_as_on_cpu():
        raise KeyError
    with attention_as_on_cpu():
        assert attended("meta") != before
        # PyTorch draws the mask of dropout with another operation on meta tensors.
        assert FUSED not in [name for name, _ in attended("meta", dropout_p=0.1)]
    assert attended("meta") == before


def test_threads_describe_at_the_same_time() -> None:
    model = GPT(17, context=64, width=32, num_layers=2, num_heads=2)
    batch = torch.zeros(2, 64, dtype=torch.int64)
    expected = describe(model, batch)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: describe(model, batch), range(8))) == [expected] * 8
