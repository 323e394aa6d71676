"""A decoder as in GPT-2 (Radford et al. 2019), written plainly."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention


class Size(NamedTuple):
    """The sizes of a decoder."""

    num_tokens: int
    length: int
    width: int
    num_heads: int
    num_blocks: int


GPT2 = Size(50_257, 1024, 768, 12, 12)  # 124 million parameters


class Block(nn.Module):
    """Attention to the tokens before, and a layer for each token: [batch, length, width]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self._num_heads = size.num_heads
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attention = nn.Linear(size.width, 3 * size.width)
        self.projection = nn.Linear(size.width, size.width)
        self.layers = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Run the block."""
        heads = (
            one.unflatten(-1, (self._num_heads, -1)).transpose(1, 2)
            for one in self.attention(self.norm1(x)).chunk(3, -1)
        )
        attended = scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        result: Tensor = x + self.layers(self.norm2(x))
        return result


class GPT(nn.Module):
    """Tokens [batch, length] to scores of the next one [batch * length, num_tokens]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.num_tokens, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.num_blocks)))
        self.norm = nn.LayerNorm(size.width)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores, by the embeddings of the tokens."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.tokens(tokens) + self.positions(places))
        return linear(self.norm(x), self.tokens.weight).flatten(0, 1)
