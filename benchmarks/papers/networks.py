"""Define networks of published tables that are not built into Paceline, for planning only.

BERT: Devlin et al., "BERT: pre-training of deep bidirectional transformers", 2018, uncased, with
its masked-language-model head and without dropout.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn

from paceline.core.workload import Workload
from paceline.training.models.describe import describe
from paceline.training.models.networks import Bottleneck, ResNet
from paceline.training.models.transformers import Attention, FeedForward
from paceline.training.recipes.named import workload_of

_VOCABULARY, _CONTEXT = 30_522, 512
_norm = partial(nn.LayerNorm, eps=1e-12)


class _Embedding(nn.Module):
    """Sum of token, position and segment embeddings, normalised: (B, T) to (B, T, C)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_VOCABULARY, width)
        self.positions = nn.Embedding(_CONTEXT, width)
        self.segments = nn.Embedding(2, width)
        self.norm = _norm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) to (B, T, C)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places) + self.segments(torch.zeros_like(places))
        return self.norm(x)


class _Block(nn.Module):
    """A post-norm transformer block: (B, T, C) to (B, T, C)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, num_heads, causal=False)
        self.norm1 = _norm(width)
        self.feed_forward = FeedForward(width, nn.GELU())
        self.norm2 = _norm(width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.feed_forward(x))


def bert(width: int, num_layers: int, num_heads: int) -> nn.Module:
    """Build BERT: tokens (B, T) to logits (B, T, V), output weight tied to the embedding."""
    embedding, output = _Embedding(width), nn.Linear(width, _VOCABULARY)
    output.weight = embedding.tokens.weight
    blocks = nn.Sequential(*(_Block(width, num_heads) for _ in range(num_layers)))
    hidden = nn.Linear(width, width), nn.GELU(), _norm(width)
    return nn.Sequential(embedding, blocks, *hidden, output)


_IMAGES, _TOKENS = (3, 224, 224), (_CONTEXT,)
_NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet101": (partial(ResNet, Bottleneck, (3, 4, 23, 3)), _IMAGES),
    "resnet152": (partial(ResNet, Bottleneck, (3, 8, 36, 3)), _IMAGES),
    "bert-base": (partial(bert, 768, 12, 12), _TOKENS),
    "bert-large": (partial(bert, 1024, 24, 16), _TOKENS),
}


@cache
def step_of(name: str, batch_size: int) -> Workload:
    """Describe a training step of one of these networks or of a built-in network."""
    if name not in _NETWORKS:
        return workload_of(name, batch_size)
    make, shape = _NETWORKS[name]
    dtype = torch.int64 if shape == _TOKENS else torch.float32
    with torch.device("meta"):
        model, samples = make(), torch.zeros(batch_size, *shape, dtype=dtype)
    return describe(model, samples, name)
