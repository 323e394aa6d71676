"""What `describe` finds in GPT, BERT and ViT, against counts by hand.

B samples of T tokens are R = B T rows; C is the width, H the number of heads, V the vocabulary.
"""

from math import prod
from typing import Any

import pytest
import torch

from paceline.models import describe, find
from paceline.models.layers import layers_of
from paceline.models.transformers import BERT, GPT, ViT
from paceline.recipes.named import workload_of

B, T, C, H, V = 3, 10, 12, 2, 17
R = B * T
CONTEXT = 14
CLASSES, IMAGE, PATCH = 5, (3, 8, 12), 4
TOKENS = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(0))
IMAGES = torch.zeros(B, *IMAGE)


def gpt(**options: Any) -> GPT:
    return GPT(V, context=CONTEXT, width=C, num_layers=2, num_heads=H, **options)


def bert() -> BERT:
    return BERT(V, context=CONTEXT, width=C, num_layers=2, num_heads=H)


def vit() -> ViT:
    return ViT(CLASSES, image=IMAGE, patch=PATCH, width=C, num_layers=2, num_heads=H)


def linear(inputs: int, outputs: int, bias: bool = True) -> tuple[int, int]:
    """A product forward; backward two, and a sum over the rows for the bias."""
    product = 2 * R * inputs * outputs
    return product, 2 * product + bias * R * outputs


def plus(one: tuple[int, int], forward: int, backward: int) -> tuple[int, int]:
    return one[0] + forward, one[1] + backward


@pytest.mark.parametrize("tied", [True, False])
def test_layers_of_gpt_compute_what_is_counted_by_hand(tied: bool) -> None:
    values, scores = R * C, 2 * R * T * C
    norm, logits = (8 * values, 13 * values), linear(C, V, bias=False)
    block = {
        # A norm's backward hands its gradient to the branch's begin, where the other one joins.
        "norm1": plus(norm, 0, values),
        # Causal or not: the kernel of the CPU leaves out only whole blocks of 512 keys.
        "attention.qkv": plus(linear(C, 3 * C), 2 * scores, 5 * scores),
        "attention.output": plus(linear(C, C), values, 0),
        "norm2": plus(norm, 0, values),
        "feed_forward.hidden": plus(linear(C, 4 * C), 13 * 4 * values, 22 * 4 * values),  # GELU
        "feed_forward.output": plus(linear(4 * C, C), values, 0),
    }
    by_hand = {
        "embedding.tokens": (0, values + (V * C if tied else 0)),  # both gradients of the weight
        "embedding.positions": (values, values + T * C),
        **{f"blocks.{n}.{name}": costs for n in range(2) for name, costs in block.items()},
        # With tied weights the output layer has no parameter of its own.
        "norm": plus(norm, *logits) if tied else norm,
        **({} if tied else {"head": logits}),
    }
    layers = describe(gpt(tied=tied), TOKENS).layers
    assert {one.name: (one.forward.flops, one.backward.flops) for one in layers} == by_hand


def test_gpt2_takes_the_published_six_operations_per_parameter_and_token() -> None:
    """Kaplan et al. 2020, section 2.1: 2 N + 2 n_layer n_ctx d forward, for N without embeddings.

    Theirs counts a token's attention to half of the others; over all T x T scores it is twice that,
    and 5 / 2 of that backward. The rest (norms, GELU, sums) is below two per cent.
    """
    layers, context, width, vocabulary = 12, 1024, 768, 50_257
    weights = layers * 12 * width * width + vocabulary * width  # the output layer's, too
    scores = layers * 2 * 2 * context * width
    workload = workload_of("gpt2", 1, None)
    forward = sum(layer.forward.flops for layer in workload.layers) / context
    backward = sum(layer.backward.flops for layer in workload.layers) / context
    assert 1 < forward / (2 * weights + scores) < 1.02
    assert 1 < backward / (4 * weights + 2.5 * scores) < 1.02


def test_parameters_of_a_module_that_is_no_leaf_are_a_layer_before_its_parts() -> None:
    first, second = layers_of(vit())[:2]
    assert [name for name, _ in first.parameters] == [
        "embedding.class_token",
        "embedding.positions",
    ]
    assert (first.name, second.name) == ("embedding", "embedding.patches")
    workload = describe(vit(), IMAGES)
    # The sum of their gradients is there before that of the patches, which takes it in.
    order = [layer.name for layer in workload.in_backward_order]
    assert order[-2:] == ["embedding", "embedding.patches"]


def test_a_tied_weight_belongs_to_the_embedding_and_is_ready_last() -> None:
    for workload in (describe(gpt(), TOKENS), describe(bert(), TOKENS)):
        sizes = {layer.name: layer.num_parameters for layer in workload.layers}
        assert sizes["embedding.tokens"] == V * C
        assert sizes.get("head.output", V) == V  # its bias, if it has one
        assert workload.in_backward_order[-1].name == "embedding.tokens"
    assert describe(gpt(), TOKENS).num_parameters == sum(p.numel() for p in gpt().parameters())


def test_attention_keeps_its_inputs_and_result_and_no_scores() -> None:
    layers = {layer.name: layer for layer in describe(gpt(), TOKENS).layers}
    # q, k, v, what comes out, and a number for each row of scores.
    kept = 4 * (3 * R * C + R * C + R * H)
    assert layers["blocks.0.attention.qkv"].kept_nbytes == kept
    assert layers["blocks.0.attention.qkv"].activation_nbytes == 4 * R * C


@pytest.mark.parametrize("name", ["gpt-1m-untied", "bert", "vit"])
def test_a_built_in_name_is_described_without_a_shape(name: str) -> None:
    architecture = find(name)
    workload = workload_of(name, 2, None)
    shape = architecture.input_shape
    assert shape is not None
    assert workload.input_nbytes == 2 * prod(shape) * architecture.input_dtype.itemsize
    with torch.device("meta"):
        model = architecture.build(None)
    assert workload.num_parameters == sum(p.numel() for p in model.parameters())


def test_fewer_tokens_than_the_context_can_be_described() -> None:
    whole, half = workload_of("gpt", 2, None), workload_of("gpt", 2, (128,))
    qkv = "blocks.0.attention.qkv"
    (long, short) = (
        next(layer for layer in workload.layers if layer.name == qkv) for workload in (whole, half)
    )
    assert long.kept_nbytes == 2 * (short.kept_nbytes or 0)
    assert long.forward.flops > 2 * short.forward.flops  # attention is quadratic
