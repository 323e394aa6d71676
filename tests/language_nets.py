"""A small language model with an untied head, and a recipe."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.training.recipes.losses import bits_per_byte, next_token_loss
from paceline.training.recipes.recipe import Recipe

VOCABULARY, TOKENS, WIDTH = 23, 6, 8  # neither 2 nor 3 ranks divide the vocabulary
IGNORED = -100


class Attention(nn.Module):
    """Causal attention of two heads; tokens with `mask` False are ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        heads = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        if mask is not None:  # a token always sees itself
            seen = seen & (mask[:, None, None, :] | torch.eye(len(seen), dtype=torch.bool))
        mixed = F.scaled_dot_product_attention(*heads, attn_mask=seen)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Language(nn.Module):
    """A language model whose forward reads sizes, and has an optional argument."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.zeros(TOKENS, WIDTH))
        self.attention, self.norm = Attention(), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        assert tokens.shape[1] <= TOKENS
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        x = x + self.attention(x, mask)
        return self.head(self.norm(x))


class Counting(torch.utils.data.Dataset):
    """Samples of ascending tokens; the first two targets of each sample are ignored."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = (index + torch.arange(7)) % VOCABULARY
        targets = tokens[1:].clone()
        targets[:2] = IGNORED
        return tokens[:-1], targets


def counting() -> Recipe:
    return Recipe(
        model=Language,
        train=Counting(120),
        test=Counting(30),
        loss=next_token_loss,
        score=bits_per_byte,
    )
