"""Trace attention on meta tensors as one fused operation, as on the CPU.

For meta tensors, PyTorch's `scaled_dot_product_attention` runs two products and a softmax, and
keeps all T x T scores for backward. For CPU tensors, PyTorch runs a fused kernel. The fused kernel
keeps only the result and one number per row of scores, and recomputes the scores in backward.
"""

from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

_FLASH = 1  # the fused kernel's number in torch._fused_sdp_choice


class AttentionAsOnCpu(TorchFunctionMode):
    """Within the context, traces attention on meta tensors as on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call the function; replace attention on meta tensors."""
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    with _disable_current_modes():
        tensors = (one if one is None else _on_cpu(one) for one in (query, key, value, attn_mask))
        choice = torch._fused_sdp_choice(*tensors, dropout_p, is_causal, **options)
    if choice != _FLASH or not query.is_meta:
        own = query, key, value, attn_mask, dropout_p, is_causal
        return F.scaled_dot_product_attention(*own, **options)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        shown = torch.scalar_tensor(0.0, dtype=query.dtype, device=query.device)
        hidden = torch.scalar_tensor(-inf, dtype=query.dtype, device=query.device)
        attn_mask = torch.where(attn_mask, shown, hidden)
    kernel, scale = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, options.get("scale")
    return kernel(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


def _on_cpu(tensor: Tensor) -> Tensor:
    """Return a CPU tensor of the same shape in a few bytes, by expanding one value."""
    is_dense = tensor.dim() > 0 and tensor.stride(-1) == 1
    values = torch.empty(tensor.shape[-1:] if is_dense else 1, dtype=tensor.dtype, device="cpu")
    return values.expand(tensor.shape).requires_grad_(tensor.requires_grad)
