"""GPT, BERT and ViT: published sizes and arithmetic, initial weights, and that they learn."""

from math import log

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm

from paceline.core.defaults import usual_for
from paceline.core.errors import InvalidInput
from paceline.data import load
from paceline.data.sampler import shuffled
from paceline.models.factory import find
from paceline.models.transformer_blocks import Attention
from paceline.models.transformers import BERT, GPT, ViT
from paceline.recipes.losses import next_token_loss


def full(inputs: int, outputs: int) -> int:
    return (inputs + 1) * outputs


def norm(width: int) -> int:
    return 2 * width


def block(width: int) -> int:
    """Parameters of a block: attention with four projections, feed-forward network, two norms."""
    attention = 4 * full(width, width)
    return attention + full(width, 4 * width) + full(4 * width, width) + 2 * norm(width)


def gpt_size(vocabulary: int, context: int, width: int, layers: int, tied: bool = True) -> int:
    embeddings = (vocabulary + context) * width
    head = 0 if tied else vocabulary * width
    return embeddings + layers * block(width) + norm(width) + head


def bert_size(vocabulary: int, context: int, width: int, layers: int) -> int:
    embeddings = (vocabulary + context + 2) * width + norm(width)
    head = full(width, width) + norm(width) + vocabulary
    return embeddings + layers * block(width) + head


def vit_size(
    patch: tuple[int, int, int], tokens: int, width: int, layers: int, classes: int
) -> int:
    channels, height, columns = patch
    embeddings = full(channels * height * columns, width) + width + tokens * width
    return embeddings + layers * block(width) + norm(width) + full(width, classes)


@pytest.mark.parametrize(
    ("name", "exact", "closed_form"),
    [
        ("gpt2", 124_439_808, gpt_size(50_257, 1024, 768, 12)),  # as published, counted exactly
        ("gpt2-untied", 163_037_184, gpt_size(50_257, 1024, 768, 12, tied=False)),
        ("gpt", 3_290_624, gpt_size(256, 256, 256, 4)),
        ("gpt-untied", 3_356_160, gpt_size(256, 256, 256, 4, tied=False)),
        ("gpt-1m", 1_057_152, gpt_size(256, 256, 128, 5)),
        ("gpt-1m-untied", 1_089_920, gpt_size(256, 256, 128, 5, tied=False)),
        ("gpt-10m", 10_844_160, gpt_size(256, 256, 384, 6)),
        ("gpt-10m-untied", 10_942_464, gpt_size(256, 256, 384, 6, tied=False)),
        ("gpt-30m", 30_033_920, gpt_size(256, 512, 640, 6)),
        ("gpt-30m-untied", 30_197_760, gpt_size(256, 512, 640, 6, tied=False)),
        # Transformers' BertForMaskedLM of bert-base-uncased: without pooler, with this head.
        ("bert-base", 109_514_298, bert_size(30_522, 512, 768, 12)),
        ("bert-large", 335_174_458, bert_size(30_522, 512, 1024, 24)),
        ("bert", 3_357_953, bert_size(257, 256, 256, 4)),
        # torchvision's vit_b_16.
        ("vit-b-16", 86_567_656, vit_size((3, 16, 16), 1 + 14 * 14, 768, 12, 1000)),
        ("vit", 821_642, vit_size((3, 8, 8), 1 + 4 * 4, 128, 4, 10)),
    ],
)
def test_parameter_counts(name: str, exact: int, closed_form: int) -> None:
    with torch.device("meta"):
        model = find(name).build(None)
    assert sum(p.numel() for p in model.parameters()) == exact == closed_form


def test_bert_base_is_the_published_110_million_with_pooler_in_place_of_the_head() -> None:
    # Transformers' BertModel, which has the pooler and no head, has 109,482,240.
    head = full(768, 768) + norm(768) + 30_522
    assert bert_size(30_522, 512, 768, 12) - head + full(768, 768) == 109_482_240


def small_gpt(**options: bool | float) -> GPT:
    torch.manual_seed(0)
    return GPT(11, context=8, width=16, num_layers=2, num_heads=4, **options)  # type: ignore[arg-type]


def small_bert() -> BERT:
    torch.manual_seed(0)
    return BERT(11, context=8, width=16, num_layers=2, num_heads=4)


def tokens(samples: int = 3, length: int = 8) -> Tensor:
    return torch.randint(11, (samples, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("place", range(1, 8))
def test_a_later_token_never_changes_earlier_logits_of_gpt(place: int) -> None:
    model, before = small_gpt(), tokens()
    after = before.clone()
    after[:, place] = (after[:, place] + 1) % 11
    with torch.no_grad():
        old, new = model(before), model(after)
    assert torch.equal(old[:, :place], new[:, :place])
    for later in range(place, 8):  # attention carries it to all that follow
        assert not torch.equal(old[:, later], new[:, later])


def test_a_later_token_changes_earlier_logits_of_bert() -> None:
    model, before = small_bert(), tokens()
    after = before.clone()
    after[:, 7] = (after[:, 7] + 1) % 11
    with torch.no_grad():
        assert (model(before)[:, 0] - model(after)[:, 0]).abs().max() > 1e-4


def test_bert_sees_nothing_of_what_the_mask_hides() -> None:
    model, before = small_bert(), tokens()
    after = before.clone()
    after[:, 5:] = (after[:, 5:] + 3) % 11
    mask = torch.ones(3, 8, dtype=torch.int64)
    mask[:, 5:] = 0
    with torch.no_grad():
        old, new = model(before, attention_mask=mask), model(after, attention_mask=mask)
        shorter, unmasked = model(before[:, :5]), model(before)
    assert torch.equal(old[:, :5], new[:, :5])
    torch.testing.assert_close(old[:, :5], shorter)
    assert (old[:, :5] - unmasked[:, :5]).abs().max() > 1e-4


def naive_attention(layer: Attention, x: Tensor, causal: bool) -> Tensor:
    """Attention head by head and token by token, in float64."""
    samples, length, width = x.shape
    depth = width // layer.num_heads
    weight, bias = layer.qkv.weight.double(), layer.qkv.bias.double()
    projected = x.double() @ weight.T + bias
    result = torch.zeros(samples, length, width, dtype=torch.float64)
    for sample in range(samples):
        for head in range(layer.num_heads):
            q, k, v = (
                projected[sample, :, part * width + head * depth :][:, :depth] for part in range(3)
            )
            for place in range(length):
                seen = place + 1 if causal else length
                scores = (k[:seen] @ q[place]) / depth**0.5
                shares = torch.exp(scores) / torch.exp(scores).sum()
                result[sample, place, head * depth : (head + 1) * depth] = shares @ v[:seen]
    return result @ layer.output.weight.double().T + layer.output.bias.double()


@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_a_weighted_mean_of_values(causal: bool) -> None:
    torch.manual_seed(0)
    layer = Attention(12, 3, causal=causal)
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(layer(x).double(), naive_attention(layer, x, causal))


def normed(x: Tensor, layer: nn.LayerNorm) -> Tensor:
    return layer_norm(x, x.shape[-1:], layer.weight.double(), layer.bias.double(), layer.eps)


def product(x: Tensor, layer: nn.Module) -> Tensor:
    assert isinstance(layer, nn.Linear)
    bias = 0 if layer.bias is None else layer.bias.double()
    return x @ layer.weight.double().T + bias


def test_gpt_is_the_published_network() -> None:
    """Radford et al. 2019, section 2.3: norms before each branch, and one after the last block."""
    model, given = small_gpt(), tokens()
    x = model.embedding.tokens.weight.double()[given] + model.embedding.positions.weight.double()
    for block in model.blocks:
        x = x + naive_attention(block.attention, normed(x, block.norm1), causal=True)
        hidden = product(normed(x, block.norm2), block.feed_forward.hidden)
        x = x + product(gelu(hidden, approximate="tanh"), block.feed_forward.output)
    logits = normed(x, model.norm) @ model.embedding.tokens.weight.double().T
    torch.testing.assert_close(model(given).double(), logits, rtol=1e-4, atol=1e-5)


def test_bert_is_the_published_network() -> None:
    """Devlin et al. 2018 with Vaswani et al. 2017: norms after each sum, one segment."""
    model, given = small_bert(), tokens()
    embedding = model.embedding
    x = embedding.tokens.weight.double()[given] + embedding.positions.weight.double()
    x = normed(x + embedding.segments.weight.double()[0], embedding.norm)
    for block in model.blocks:
        x = normed(x + naive_attention(block.attention, x, causal=False), block.norm1)
        hidden = gelu(product(x, block.feed_forward.hidden))
        x = normed(x + product(hidden, block.feed_forward.output), block.norm2)
    x = normed(gelu(product(x, model.head.hidden)), model.head.norm)
    logits = x @ embedding.tokens.weight.double().T + model.head.output.bias.double()
    torch.testing.assert_close(model(given).double(), logits, rtol=1e-4, atol=1e-5)


def test_vit_is_the_published_network() -> None:
    """Dosovitskiy et al. 2020, equations 1 to 4; patches are read row by row."""
    torch.manual_seed(0)
    model = ViT(5, image=(3, 8, 12), patch=4, width=12, num_layers=2, num_heads=3)
    with torch.no_grad():  # which begins with zeros
        model.embedding.class_token.normal_()
    images = torch.randn(2, 3, 8, 12)
    patches = [
        images[:, :, row : row + 4, column : column + 4].flatten(1).double()
        for row in (0, 4)
        for column in (0, 4, 8)
    ]
    kernel, bias = model.embedding.patches.weight.double().flatten(1), model.embedding.patches.bias
    assert bias is not None
    embedded = torch.stack(patches, 1) @ kernel.T + bias.double()
    first = model.embedding.class_token.double().expand(2, 1, 12)
    x = torch.cat([first, embedded], 1) + model.embedding.positions.double()
    for block in model.blocks:
        x = x + naive_attention(block.attention, normed(x, block.norm1), causal=False)
        hidden = gelu(product(normed(x, block.norm2), block.feed_forward.hidden))
        x = x + product(hidden, block.feed_forward.output)
    scores = product(normed(x, model.norm)[:, 0], model.head)
    torch.testing.assert_close(model(images).double(), scores, rtol=1e-4, atol=1e-5)


def test_gradient_of_a_tied_weight_is_the_sum_of_both_uses() -> None:
    tied, untied, given = small_gpt(), small_gpt(tied=False), tokens()
    with torch.no_grad():
        untied.load_state_dict(tied.state_dict())
    for model in (tied, untied):
        next_token_loss(model(given[:, :-1]), given[:, 1:]).backward()
    read, written = untied.embedding.tokens.weight.grad, untied.head.weight.grad
    assert tied.head.weight is tied.embedding.tokens.weight
    assert tied.head.weight.grad is not None
    assert read is not None
    assert written is not None
    assert read.abs().max() > 1e-3
    assert written.abs().max() > 1e-3
    torch.testing.assert_close(tied.head.weight.grad, read + written, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["gpt-1m", "bert", "vit"])
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


def test_a_new_language_model_gives_all_tokens_about_the_same_chance() -> None:
    given = tokens(200)
    for model in (small_gpt(), small_bert()):
        loss = next_token_loss(model(given[:100]), given[100:])
        assert loss.item() == pytest.approx(log(11), abs=0.1)


@pytest.mark.parametrize("model", [small_gpt(), small_bert()], ids=["gpt", "bert"])
def test_more_tokens_than_the_context_and_other_shapes_are_refused(model: nn.Module) -> None:
    assert model(tokens(length=3)).shape == (3, 3, 11)
    with pytest.raises(
        InvalidInput, match="9 tokens a sample are more than the model's context, 8"
    ):
        model(tokens(length=9))
    with pytest.raises(InvalidInput, match=r"tokens of shape \(3,\): right would be two"):
        model(torch.zeros(3, dtype=torch.int64))


def test_images_of_another_size_are_refused() -> None:
    model = find("vit").build(None)
    with pytest.raises(InvalidInput, match=r"\(1, 32, 32\) do not fit .* takes \(3, 32, 32\)"):
        model(torch.zeros(2, 1, 32, 32))


def test_heads_must_share_the_width() -> None:
    with pytest.raises(InvalidInput, match="3 heads cannot share a width of 16"):
        GPT(11, context=8, width=16, num_layers=1, num_heads=3)


def test_dropout_is_for_training_only_and_off_by_default() -> None:
    given = tokens()
    dropping, plain = small_gpt(dropout=0.5), small_gpt()
    assert not torch.equal(dropping(given), dropping(given))
    assert torch.equal(dropping.eval()(given), plain(given))
    assert torch.equal(plain(given), plain.train()(given))


def test_gpt_learns_a_repetitive_text() -> None:
    """What follows is certain after the first period, of 5 tokens in a window of 30.

    A model that knows nothing of order has at least the text's entropy, log 5. With each place
    of the first period unknown and the rest certain, the mean is 5 log(5) / 30.
    """
    torch.manual_seed(0)
    model = GPT(11, context=30, width=32, num_layers=2, num_heads=2)
    text = torch.arange(5).repeat(100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(60):
        starts = (7 * step + torch.arange(8)[:, None]) % 5 + torch.arange(31)
        batch = text[starts]
        loss = next_token_loss(model(batch[:, :-1]), batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 5 * log(5) / 30


def test_vit_learns_the_digits() -> None:
    """Chance is a tenth; two epochs of 64 samples a step do far better."""
    torch.manual_seed(0)
    architecture = find("vit")
    data = load(usual_for(architecture.name).data, architecture.input_shape)
    model = architecture.build(data.num_classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(2):
        for rows in torch.tensor(shuffled(len(data.train), 0, epoch)).split(64):
            inputs, targets = data.train.__getitems__(rows.tolist())
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    inputs, targets = data.test.__getitems__(range(len(data.test)))
    with torch.no_grad():
        right = (model(inputs).argmax(1) == targets).float().mean().item()
    assert right > 0.5
