"""GPT-2 and ViT as published.

GPT-2: Radford et al., "Language models are unsupervised multitask learners", 2019. ViT: Dosovitskiy
et al., "An image is worth 16x16 words", 2020.

Shapes: B samples, T tokens per sample, C values per token, H attention heads of D = C / H values
each, V tokens in the vocabulary. Dropout is off by default, so that the result of a training step
depends only on its samples.
"""

from functools import partial
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.errors import InvalidInput

_DEVIATION = 0.02  # standard deviation of GPT-2's initial weights
_HIDDEN = 4  # hidden width of a feed-forward network, relative to the block's width


class Attention(nn.Module):
    """Self-attention of `num_heads` heads: (B, T, C) to (B, T, C).

    `causal`: a token attends only to itself and to earlier tokens. Raises InvalidInput if
    `num_heads` does not divide `width`.
    """

    def __init__(self, width: int, num_heads: int, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        if width % num_heads:
            raise InvalidInput("num_heads", f"must divide the width {width}", got=num_heads)
        self.num_heads, self.causal, self.dropout = num_heads, causal, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, C) to (B, T, C)."""
        heads = (self.num_heads, x.shape[-1] // self.num_heads)
        parts = self.qkv(x).chunk(3, dim=-1)
        query, key, value = (one.unflatten(2, heads).transpose(1, 2) for one in parts)
        dropout = self.dropout if self.training else 0.0
        x = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=self.causal
        )
        result: Tensor = self.output(x.transpose(1, 2).flatten(2))  # (B, T, H, D), then (B, T, C)
        return result


class FeedForward(nn.Sequential):
    """Two linear layers applied to each token: (B, T, C) to (B, T, C)."""

    def __init__(self, width: int, gelu: nn.Module) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, _HIDDEN * width)
        self.gelu = gelu
        self.output = nn.Linear(_HIDDEN * width, width)


class PreNormBlock(nn.Module):
    """Transformer block with layer norm before attention and before the feed-forward network."""

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
        """Map (B, T, C) to (B, T, C)."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        result: Tensor = x + self.dropout(self.feed_forward(self.norm2(x)))
        return result


class TokenEmbedding(nn.Module):
    """Sum of token and position embeddings: (B, T) to (B, T, C), T up to `context`."""

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (B, T) to (B, T, C). Raises InvalidInput for more tokens than `context`."""
        if tokens.dim() != 2:
            problem = "must have the shape (samples, tokens)"
            raise InvalidInput("tokens", problem, got=tuple(tokens.shape))
        length = tokens.shape[1]
        if length > self.context:
            problem = f"must be at most {self.context} tokens, the model's context"
            raise InvalidInput("input_shape", problem, got=length)
        places = torch.arange(length, device=tokens.device)
        result: Tensor = self.dropout(self.tokens(tokens) + self.positions(places))
        return result


class GPT(nn.Sequential):
    """GPT-2: tokens (B, T) to the logits (B, T, V) of each next token; T is at most `context`.

    `tied`: the output layer shares the token embedding's weight, as published.
    """

    def __init__(
        self,
        vocabulary: int = 50_257,
        *,
        context: int = 1024,
        width: int = 768,
        num_layers: int = 12,
        num_heads: int = 12,
        tied: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(vocabulary, context, width, dropout)
        blocks = [
            PreNormBlock(
                Attention(width, num_heads, causal=True, dropout=dropout),
                width,
                gelu=nn.GELU(approximate="tanh"),
                epsilon=1e-5,
                dropout=dropout,
            )
            for _ in range(num_layers)
        ]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.tokens.weight
        _zero_biases(self)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=_DEVIATION)
        # Scale the weights so that the sum of all residual branches (two per block) has the
        # variance of a single branch.
        for block in blocks:
            for layer in (block.attention.output, block.feed_forward.output):
                nn.init.normal_(layer.weight, std=_DEVIATION / sqrt(2 * num_layers))


class PatchEmbedding(nn.Module):
    """Embeds a class token and image patches: (B, channels, height, width) to (B, T, C).

    T is the number of patches plus one. Position embeddings are added.
    """

    def __init__(self, image: tuple[int, int, int], patch: int, width: int) -> None:
        super().__init__()
        channels, height, columns = self.image = image
        num_patches = (height // patch) * (columns // patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(_DEVIATION * torch.randn(1, 1 + num_patches, width))
        self.patches = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        """Map (B, channels, height, width) to (B, T, C); raise InvalidInput for other sizes."""
        if tuple(images.shape[1:]) != self.image:
            problem = f"must be {self.image} for this ViT"
            raise InvalidInput("input_shape", problem, got=tuple(images.shape[1:]))
        x = self.patches(images).flatten(2).transpose(1, 2)  # (B, C, h, w), then (B, h w, C)
        x = torch.cat((self.class_token.expand(len(x), -1, -1), x), dim=1)  # (B, 1 + h w, C)
        return x + self.positions


class ViT(nn.Module):
    """Vision transformer: maps images (B, *`image`) to scores (B, `num_classes`)."""

    def __init__(
        self,
        num_classes: int = 1000,
        *,
        image: tuple[int, int, int] = (3, 224, 224),
        patch: int = 16,
        width: int = 768,
        num_layers: int = 12,
        num_heads: int = 12,
    ) -> None:
        super().__init__()
        self.embedding = PatchEmbedding(image, patch, width)
        blocks = (
            PreNormBlock(
                Attention(width, num_heads, causal=False), width, gelu=nn.GELU(), epsilon=1e-6
            )
            for _ in range(num_layers)
        )
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, num_classes)
        _zero_biases(self)
        for module in self.blocks.modules():  # as in the authors' code
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
        nn.init.normal_(self.embedding.patches.weight, std=1 / sqrt(image[0] * patch * patch))
        # The authors' code uses zeros, but then the first step would train only the head.
        nn.init.normal_(self.head.weight, std=_DEVIATION)

    def forward(self, images: Tensor) -> Tensor:
        """Map (B, channels, height, width) to (B, `num_classes`)."""
        x = self.blocks(self.embedding(images))  # (B, T, C)
        scores: Tensor = self.head(self.norm(x[:, 0]))  # the class token's output
        return scores


def _zero_biases(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)


gpt = partial(GPT, context=256, width=256, num_layers=4, num_heads=4)
gpt_1m = partial(GPT, context=256, width=128, num_layers=5, num_heads=2)
gpt_10m = partial(GPT, context=256, width=384, num_layers=6, num_heads=6)
gpt_30m = partial(GPT, context=512, width=640, num_layers=6, num_heads=10)
vit = partial(ViT, image=(3, 32, 32), patch=8, width=128, num_layers=4, num_heads=4)
