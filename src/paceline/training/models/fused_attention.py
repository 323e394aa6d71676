"""Trace attention on meta tensors as one fused operation, as on the CPU.

For meta tensors, PyTorch's `scaled_dot_product_attention` runs two products and a softmax, and
keeps all T x T scores for backward. For CPU tensors, PyTorch runs a fused kernel. The fused kernel
keeps only the result and one number per row of scores, and recomputes the scores in backward.
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
_FLASH = 1  # returned by torch._fused_sdp_choice for the fused kernel
_registration = RLock()  # one thread at a time: PyTorch refuses to register a kernel twice


@contextmanager
def attention_as_on_cpu() -> Iterator[None]:
    """Return a context in which attention on meta tensors is traced as on the CPU.

    This applies to all threads. Only one thread at a time can be in the context; others wait.
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
    """Call the operation that `scaled_dot_product_attention` would choose for CPU tensors."""
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
    """Return a CPU tensor of the same shape that uses little memory, by expanding one row."""
    is_dense = tensor.dim() > 0 and tensor.stride(-1) == 1
    values = torch.empty(tensor.shape[-1:] if is_dense else 1, dtype=tensor.dtype, device="cpu")
    return values.expand(tensor.shape).requires_grad_(tensor.requires_grad)
