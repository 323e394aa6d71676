"""Transformers: GPT, BERT and ViT, as published.

GPT-2: Radford et al., "Language models are unsupervised multitask learners", 2019. BERT: Devlin et
al., "BERT: pre-training of deep bidirectional transformers", 2018. ViT: Dosovitskiy et al., "An
image is worth 16x16 words", 2020.

Shapes: B samples of T tokens, each token C values wide, in H heads of D = C / H; a vocabulary of V.
No dropout unless it is asked for, so that a step depends on its samples alone.
"""

from functools import partial
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.errors import InvalidInput

_DEVIATION = 0.02  # of initial weights, in all three publications
_HIDDEN = 4  # times the width, between the two layers of a block's feed-forward network


class Attention(nn.Module):
    """Self-attention of `num_heads` heads: (B, T, C) to (B, T, C).

    `causal`: a token sees itself and the ones before it. Raises InvalidInput if the heads do not
    divide the width.
    """

    def __init__(self, width: int, num_heads: int, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        if width % num_heads:
            raise InvalidInput(f"{num_heads} heads cannot share a width of {width}: it must divide")
        self.num_heads, self.causal, self.dropout = num_heads, causal, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, T, C) to (B, T, C). `mask` (B, T): True for the tokens that may be seen."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)  # each (B, T, C)
        x = F.scaled_dot_product_attention(
            self._heads(q),  # (B, H, T, D), as the next two
            self._heads(k),
            self._heads(v),
            attn_mask=None if mask is None else mask[:, None, None, :].bool(),  # (B, 1, 1, T)
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
        )
        result: Tensor = self.output(x.transpose(1, 2).flatten(2))  # (B, T, H, D), then (B, T, C)
        return result

    def _heads(self, x: Tensor) -> Tensor:
        split = x.view(*x.shape[:2], self.num_heads, -1)  # (B, T, H, D)
        return split.transpose(1, 2)


class FeedForward(nn.Sequential):
    """Two layers, applied to each token by itself: (B, T, C) to (B, T, C)."""

    def __init__(self, width: int, gelu: nn.Module) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, _HIDDEN * width)
        self.gelu = gelu
        self.output = nn.Linear(_HIDDEN * width, width)


class PreNormBlock(nn.Module):
    """A block of GPT-2 and ViT, which normalises what attention and feed-forward network read."""

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


class PostNormBlock(nn.Module):
    """A block of BERT, which normalises the sums."""

    def __init__(self, attention: Attention, width: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = attention
        self.norm1 = nn.LayerNorm(width, eps=1e-12)
        self.feed_forward = FeedForward(width, nn.GELU())
        self.norm2 = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, T, C) to (B, T, C). `mask` is that of `Attention`."""
        x = self.norm1(x + self.dropout(self.attention(x, mask)))
        result: Tensor = self.norm2(x + self.dropout(self.feed_forward(x)))
        return result


class TokenEmbedding(nn.Module):
    """The sum of what a token is and where it stands: (B, T) to (B, T, C), T up to `context`."""

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) to (B, T, C). Raises InvalidInput for more tokens than the context."""
        places = _places(tokens, self.context)
        x: Tensor = self.tokens(tokens) + self.positions(places)  # (B, T, C) + (T, C)
        result: Tensor = self.dropout(x)
        return result


class GPT(nn.Module):
    """GPT-2: tokens (B, T), T up to `context`, to the logits (B, T, V) of each next token.

    The output layer shares its weight with the embedding of the tokens if `tied`, as published.
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
        _initialise(self)
        _shrink_residual_branches(blocks)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) to (B, T, V). Raises InvalidInput for more tokens than the context."""
        x = self.embedding(tokens)  # (B, T, C)
        x = self.blocks(x)  # (B, T, C)
        logits: Tensor = self.head(self.norm(x))  # (B, T, V)
        return logits


class BertEmbedding(nn.Module):
    """Token, position and segment, summed and normalised: (B, T) to (B, T, C).

    All tokens are in segment 0: pairs of texts are no part of masked language modelling.
    """

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) to (B, T, C). Raises InvalidInput for more tokens than the context."""
        places = _places(tokens, self.context)
        # (B, T, C) + (T, C) + (T, C)
        x = self.tokens(tokens) + self.positions(places) + self.segments(torch.zeros_like(places))
        result: Tensor = self.dropout(self.norm(x))
        return result


class MaskedHead(nn.Module):
    """The masked-language-model head: (B, T, C) to logits (B, T, V)."""

    def __init__(self, width: int, embedding: nn.Embedding) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, width)
        self.gelu = nn.GELU()
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.output = nn.Linear(width, embedding.num_embeddings)
        self.output.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, V)."""
        logits: Tensor = self.output(self.norm(self.gelu(self.hidden(x))))
        return logits


class BERT(nn.Module):
    """BERT with its masked-language-model head, tied to the embedding of the tokens.

    Tokens (B, T), T up to `context`, to the logits (B, T, V) of what stands in each place. Without
    the pooler and the head for pairs of sentences.
    """

    def __init__(
        self,
        vocabulary: int = 30_522,
        *,
        context: int = 512,
        width: int = 768,
        num_layers: int = 12,
        num_heads: int = 12,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = BertEmbedding(vocabulary, context, width, dropout)
        self.blocks = nn.ModuleList(
            PostNormBlock(
                Attention(width, num_heads, causal=False, dropout=dropout), width, dropout=dropout
            )
            for _ in range(num_layers)
        )
        self.head = MaskedHead(width, self.embedding.tokens)
        _initialise(self)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """(B, T) to (B, T, V). `attention_mask` (B, T): not 0 for the tokens that may be seen.

        Raises InvalidInput for more tokens than the context.
        """
        x = self.embedding(tokens)  # (B, T, C)
        for block in self.blocks:
            x = block(x, attention_mask)
        logits: Tensor = self.head(x)
        return logits


class PatchEmbedding(nn.Module):
    """A class token and the patches of an image, with their places: to (B, 1 + patches, C)."""

    def __init__(self, image: tuple[int, int, int], patch: int, width: int) -> None:
        super().__init__()
        channels, height, columns = self.image = image
        num_patches = (height // patch) * (columns // patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(_DEVIATION * torch.randn(1, 1 + num_patches, width))
        self.patches = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        """(B, channels, height, width) to (B, T, C). Raises InvalidInput for another size."""
        if tuple(images.shape[1:]) != self.image:
            raise InvalidInput(
                f"images of {tuple(images.shape[1:])} do not fit this ViT, which takes {self.image}"
            )
        x = self.patches(images).flatten(2).transpose(1, 2)  # (B, C, h, w), then (B, h w, C)
        x = torch.cat((self.class_token.expand(len(x), -1, -1), x), dim=1)  # (B, 1 + h w, C)
        return x + self.positions


class ViT(nn.Module):
    """ViT: images (B, channels, height, width) of the size `image` to scores (B, `num_classes`)."""

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
        blocks = [
            PreNormBlock(
                Attention(width, num_heads, causal=False), width, gelu=nn.GELU(), epsilon=1e-6
            )
            for _ in range(num_layers)
        ]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, num_classes)
        _initialise(self)
        _shrink_residual_branches(blocks)

    def forward(self, images: Tensor) -> Tensor:
        """(B, channels, height, width) to (B, `num_classes`)."""
        x = self.blocks(self.embedding(images))  # (B, T, C)
        scores: Tensor = self.head(self.norm(x[:, 0]))  # of the class token
        return scores


def _places(tokens: Tensor, context: int) -> Tensor:
    """Return the numbers of the places (T,) of tokens (B, T)."""
    length = tokens.shape[1]
    if length > context:
        raise InvalidInput(f"{length} tokens a sample are more than the model's context, {context}")
    return torch.arange(length, device=tokens.device)


def _initialise(model: nn.Module) -> None:
    """Draw all weight matrices from a normal distribution; set biases to zero."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding):
            nn.init.normal_(module.weight, std=_DEVIATION)
        if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
            nn.init.zeros_(module.bias)


def _shrink_residual_branches(blocks: list[PreNormBlock]) -> None:
    """Draw the last layers of all branches anew, so that their sum keeps the scale of one.

    As in GPT-2: there are two branches in a block.
    """
    for block in blocks:
        for layer in (block.attention.output, block.feed_forward.output):
            nn.init.normal_(layer.weight, std=_DEVIATION / sqrt(2 * len(blocks)))


# With 256 classes 3,290,624, 1,057,152, 10,844,160 and 30,033,920 parameters.
gpt = partial(GPT, context=256, width=256, num_layers=4, num_heads=4)
gpt_1m = partial(GPT, context=256, width=128, num_layers=5, num_heads=2)
gpt_10m = partial(GPT, context=256, width=384, num_layers=6, num_heads=6)
gpt_30m = partial(GPT, context=512, width=640, num_layers=6, num_heads=10)
bert = partial(BERT, context=256, width=256, num_layers=4, num_heads=4)
vit = partial(ViT, image=(3, 32, 32), patch=4, width=128, num_layers=4, num_heads=4)
