"""Attention on meta tensors takes the operations that it takes on the CPU."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.models import describe
from paceline.models.fused_attention import attention_as_on_cpu
from paceline.models.transformers import GPT

FUSED = "_scaled_dot_product_flash_attention_for_cpu"
Made = tuple[str, list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]]


class Operations(TorchDispatchMode):
    """Lists the operations, with shape, strides and type of what they return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[Made] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        several = result if isinstance(result, tuple | list) else [result]
        tensors = [one for one in several if isinstance(one, Tensor)]
        name = func.overloadpacket.__name__
        self.made.append((name, [(tuple(t.shape), t.stride(), t.dtype) for t in tensors]))
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
def test_meta_takes_the_operations_of_the_cpu(case: str) -> None:
    is_fused, options = CASES[case]
    real = attended("cpu", **options)
    with attention_as_on_cpu():
        meta = attended("meta", **options)
    assert meta == real
    assert (FUSED in [name for name, _ in real]) is is_fused


def test_meta_with_dropout_and_afterwards_is_as_it_was() -> None:
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


def test_shapes_that_do_not_fit_are_refused_as_always() -> None:
    q, k = torch.zeros(1, 2, 3, 4, device="meta"), torch.zeros(1, 2, 3, 5, device="meta")
    with attention_as_on_cpu(), pytest.raises(RuntimeError, match=r"\[2, 4\] but got: \[2, 5\]"):
        F.scaled_dot_product_attention(q, k, k)


def test_pytorch_s_own_encoder_keeps_no_scores() -> None:
    """Its attention is called from inside of torch.nn; scores would be quadratic in the tokens."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def kept(length: int) -> int:
        layers = describe(model, torch.zeros(2, length, 8)).layers
        return sum(layer.kept_nbytes or 0 for layer in layers)

    assert kept(64) == 2 * kept(32) == 4 * kept(16)
