"""Attention and transformer blocks.

Shapes: B samples of T tokens, each token C values wide, in H heads of D = C / H.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.errors import InvalidInput

_HIDDEN = 4  # hidden width of a feed-forward network, relative to the block's


class Attention(nn.Module):
    """Self-attention of `num_heads` heads: (B, T, C) to (B, T, C).

    `causal`: a token sees itself and the ones before it. Raises InvalidInput if the heads do not
    divide the width.
    """

    def __init__(self, width: int, num_heads: int, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        if width % num_heads:
            raise InvalidInput(
                "num_heads", f"{num_heads} heads cannot share a width of {width}: it must divide"
            )
        self.num_heads, self.causal, self.dropout = num_heads, causal, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)  # each (B, T, C)
        x = F.scaled_dot_product_attention(
            self._heads(q),  # (B, H, T, D), as the next two
            self._heads(k),
            self._heads(v),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
        )
        result: Tensor = self.output(x.transpose(1, 2).flatten(2))  # (B, T, H, D), then (B, T, C)
        return result

    def _heads(self, x: Tensor) -> Tensor:
        split = x.view(*x.shape[:2], self.num_heads, -1)  # (B, T, H, D)
        return split.transpose(1, 2)


class FeedForward(nn.Sequential):
    """Two linear layers applied to each token: (B, T, C) to (B, T, C)."""

    def __init__(self, width: int, gelu: nn.Module) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, _HIDDEN * width)
        self.gelu = gelu
        self.output = nn.Linear(_HIDDEN * width, width)


class PreNormBlock(nn.Module):
    """Pre-norm block of GPT-2 and ViT."""

    def __init__(
        self,
        attention: Attention,
        width: int,
        *,
        gelu: nn.Module,
        epsilon: float,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=epsilon)
        self.attention = attention
        self.norm2 = nn.LayerNorm(width, eps=epsilon)
        self.feed_forward = FeedForward(width, gelu)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        result: Tensor = x + self.dropout(self.feed_forward(self.norm2(x)))
        return result
