"""GPT and ViT: published arithmetic, initial weights, dropout and refused inputs."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm

from paceline.training.models.factory import find
from paceline.training.models.transformers import GPT, Attention, ViT
from refusals import refused


def small(dropout: float = 0.0) -> GPT:
    torch.manual_seed(0)
    return GPT(11, context=8, width=16, num_layers=2, num_heads=4, dropout=dropout)


def tiny_vit() -> ViT:
    torch.manual_seed(0)
    return ViT(5, image=(3, 8, 12), patch=4, width=12, num_layers=2, num_heads=3)


def tokens(samples: int = 3, length: int = 8) -> Tensor:
    return torch.randint(11, (samples, length), generator=torch.Generator().manual_seed(1))


def naive_attention(layer: Attention, x: Tensor, causal: bool) -> Tensor:
    """Attention head by head and token by token, in float64."""
    samples, length, width = x.shape
    projected = product(x.double(), layer.qkv)
    result = torch.zeros(samples, length, width, dtype=torch.float64)
    for sample in range(samples):
        for head in range(layer.num_heads):
            depth = width // layer.num_heads
            own = slice(head * depth, (head + 1) * depth)
            q, k, v = (part[:, own] for part in projected[sample].split(width, dim=1))
            for place in range(length):
                seen = place + 1 if causal else length
                shares = torch.exp((k[:seen] @ q[place]) / depth**0.5)
                result[sample, place, own] = shares @ v[:seen] / shares.sum()
    return product(result, layer.output)


def normed(x: Tensor, layer: nn.LayerNorm) -> Tensor:
    return layer_norm(x, x.shape[-1:], layer.weight.double(), layer.bias.double(), layer.eps)


def product(x: Tensor, layer: nn.Linear) -> Tensor:
    bias = 0 if layer.bias is None else layer.bias.double()
    return x @ layer.weight.double().T + bias


def test_gpt_is_the_published_network() -> None:
    """Radford et al. 2019, section 2.3: norms before each branch, and one after the last block."""
    model, given = small(), tokens()
    assert model.head.weight is model.embedding.tokens.weight
    x = model.embedding.tokens.weight.double()[given] + model.embedding.positions.weight.double()
    for block in model.blocks:
        x = x + naive_attention(block.attention, normed(x, block.norm1), causal=True)
        hidden = product(normed(x, block.norm2), block.feed_forward.hidden)
        x = x + product(gelu(hidden, approximate="tanh"), block.feed_forward.output)
    logits = normed(x, model.norm) @ model.embedding.tokens.weight.double().T
    torch.testing.assert_close(model(given).double(), logits, rtol=1e-4, atol=1e-5)


def test_vit_is_the_published_network() -> None:
    """Dosovitskiy et al. 2020, equations 1 to 4; patches are read row by row."""
    model = tiny_vit()
    with torch.no_grad():  # initialised to zeros
        model.embedding.class_token.normal_()
    images = torch.randn(2, 3, 8, 12)
    patches = [
        images[:, :, row : row + 4, column : column + 4].flatten(1).double()
        for row in (0, 4)
        for column in (0, 4, 8)
    ]
    kernel, bias = (one.double() for one in model.embedding.patches.parameters())
    embedded = torch.stack(patches, 1) @ kernel.flatten(1).T + bias
    first = model.embedding.class_token.double().expand(2, 1, 12)
    x = torch.cat([first, embedded], 1) + model.embedding.positions.double()
    for block in model.blocks:
        x = x + naive_attention(block.attention, normed(x, block.norm1), causal=False)
        hidden = gelu(product(normed(x, block.norm2), block.feed_forward.hidden))
        x = x + product(hidden, block.feed_forward.output)
    scores = product(normed(x, model.norm)[:, 0], model.head)
    torch.testing.assert_close(model(images).double(), scores, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt-1m", "vit"])
def test_initial_weights_have_the_published_deviation(name: str) -> None:
    torch.manual_seed(0)
    model = find(name).build(None)
    num_layers = len(model.get_submodule("blocks"))

    def expected(key: str, shape: torch.Size) -> float:
        if name == "vit" and key.startswith("blocks"):  # uniform, as Glorot and Bengio 2010
            return (2 / sum(shape)) ** 0.5
        if "patches" in key:
            return (3 * 8 * 8) ** -0.5
        is_last = key.endswith(("attention.output.weight", "feed_forward.output.weight"))
        return 0.02 / (2 * num_layers) ** 0.5 if name == "gpt-1m" and is_last else 0.02

    for key, parameter in ((key, value.detach()) for key, value in model.named_parameters()):
        if "norm" in key:
            assert torch.equal(parameter, torch.full_like(parameter, float(key.endswith("weight"))))
        elif key.endswith("bias") or "class_token" in key:
            assert not parameter.any(), key
        else:
            deviation = expected(key, parameter.shape)
            assert parameter.std() == pytest.approx(deviation, rel=0.05), key
            assert abs(parameter.mean()) < 0.1 * deviation, key


@pytest.mark.parametrize(
    ("compute", "field"),
    [
        (lambda: small()(tokens(length=9)), "input_shape"),
        (lambda: small()(tokens()[0]), "tokens"),
        (lambda: find("vit").build(None)(torch.zeros(2, 1, 32, 32)), "input_shape"),
        (lambda: GPT(11, context=8, width=16, num_layers=1, num_heads=3), "num_heads"),
    ],
)
def test_inputs_and_heads_that_do_not_fit_are_refused(compute, field) -> None:
    with refused(field):
        compute()


def test_dropout_is_for_training_only_and_off_by_default() -> None:
    given = tokens()
    dropping, plain = small(dropout=0.5), small()
    assert not torch.equal(dropping(given), dropping(given))
    assert torch.equal(dropping.eval()(given), plain(given))
    assert torch.equal(plain(given), plain.train()(given))


@pytest.mark.parametrize(
    ("build", "empty"), [(small, tokens(0)), (tiny_vit, torch.zeros(0, 3, 8, 12))]
)
def test_an_empty_batch_has_zero_gradients(build, empty: Tensor) -> None:
    """Balanced batches may leave a worker without samples, and it still has a share of the step."""
    model = build()
    model(empty).sum().backward()
    assert not any(parameter.grad.any() for parameter in model.parameters())
