"""Attention on meta tensors as the kernel that runs on the CPU, not as its parts.

`scaled_dot_product_attention` chooses among kernels by device. For meta tensors PyTorch takes two
products and a softmax, which keep all T x T scores for backward. The fused kernel, which real
tensors get, keeps the result and one number per row of scores, and makes the scores again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from threading import RLock
from typing import Any

import torch
from torch import Tensor, library
from torch.utils._python_dispatch import _disable_current_modes

_aten = torch.ops.aten
_FLASH = 1  # as torch._fused_sdp_choice numbers the kernels
_registration = RLock()  # PyTorch takes one kernel for a device and operation


@contextmanager
def attention_as_on_cpu() -> Iterator[None]:
    """Trace attention on meta tensors as the CPU's kernels; in the whole process, while it lasts.

    One thread at a time; others wait.
    """
    with _registration, library._scoped_library("aten", "IMPL") as aten:
        aten.impl("scaled_dot_product_attention", _attention, "AutogradMeta")
        yield


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Return what `scaled_dot_product_attention` does, and has the same arguments."""
    with _disable_current_modes():
        q, k, v = _on_cpu(query), _on_cpu(key), _on_cpu(value)
        mask = None if attn_mask is None else _on_cpu(attn_mask)
        choice = torch._fused_sdp_choice(
            q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if choice != _FLASH:
        composed = _aten.scaled_dot_product_attention.default.decompose
        more = {"scale": scale, "enable_gqa": enable_gqa}
        return composed(query, key, value, attn_mask, dropout_p, is_causal, **more)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        shown = torch.scalar_tensor(0.0, dtype=query.dtype, device=query.device)
        hidden = torch.scalar_tensor(-inf, dtype=query.dtype, device=query.device)
        attn_mask = torch.where(attn_mask, shown, hidden)
    kernel = _aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


def _on_cpu(tensor: Tensor) -> Tensor:
    """Return a tensor that the choice takes for `tensor`, in a few bytes: it repeats its values."""
    is_dense = tensor.dim() > 0 and tensor.stride(-1) == 1
    values = torch.empty(tensor.shape[-1:] if is_dense else 1, dtype=tensor.dtype, device="cpu")
    return values.expand(tensor.shape).requires_grad_(tensor.requires_grad)
