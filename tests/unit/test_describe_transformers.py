"""What `describe` says of GPT, BERT and ViT, against counts by hand.

B samples of T tokens are R = B T rows; C is the width, H the number of heads, V the vocabulary.
Sizes are counted in values of four bytes; tokens and places take eight.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.core.workload import Cost
from paceline.models import describe, find
from paceline.models.describe import CostCounter
from paceline.models.flops import flops_of
from paceline.models.layers import layers_of
from paceline.models.transformers import BERT, GPT, ViT
from paceline.recipes.named import workload_of

B, T, C, H, V = 3, 10, 12, 2, 17
R = B * T
CONTEXT = 14
ERF, TANH = (5, 11), (13, 22)  # of GELU, by the function that defines it, forward and backward


def work(flops: int, values: int = 0, nbytes: int = 0) -> Cost:
    return Cost(flops, 4 * values + nbytes)


def linear(rows: int, inputs: int, outputs: int, bias: bool = True) -> Cost:
    weights = inputs * outputs + bias * outputs
    return work(2 * rows * inputs * outputs, rows * (inputs + outputs) + weights)


def linear_back(rows: int, inputs: int, outputs: int, bias: bool = True) -> Cost:
    """Two products, of which each reads the gradient, and a sum over the rows for the bias."""
    product = work(2 * rows * inputs * outputs, rows * (inputs + outputs) + inputs * outputs)
    summed = work(rows * outputs, rows * outputs + outputs)
    return product + product + (summed if bias else Cost())


def norm(rows: int, width: int) -> Cost:
    """Mean 1, variance 3, normalise and scale 4; it returns a mean and a deviation for each row."""
    return work(8 * rows * width, 2 * rows * width + 2 * width + 2 * rows)


def norm_back(rows: int, width: int) -> Cost:
    """Reads gradient, input, both statistics and weights; writes a gradient of each."""
    return work(13 * rows * width, 3 * rows * width + 2 * rows + 4 * width)


def added(values: int) -> Cost:
    return work(values, 3 * values)


def gelu(values: int, kind: tuple[int, int]) -> Cost:
    return work(kind[0] * values, 2 * values)


def gelu_back(values: int, kind: tuple[int, int]) -> Cost:
    return work(kind[1] * values, 3 * values)


def attention(samples: int, length: int, width: int, heads: int) -> Cost:
    """Two products over all T x T scores; reads q, k and v, writes as much as q, and a row's sum.

    Causal or not: the kernel of the CPU leaves out only whole blocks of 512 keys.
    """
    rows = samples * length
    return work(2 * (2 * rows * length * width), 4 * rows * width + rows * heads)


def attention_back(samples: int, length: int, width: int, heads: int) -> Cost:
    """Five products: the scores again, and the gradients of scores, values, queries and keys."""
    rows = samples * length
    return work(5 * (2 * rows * length * width), 8 * rows * width + rows * heads)


def joined(values: int) -> Cost:
    """Gradients of q, k and v written side by side."""
    return work(0, 2 * values)


def lookup(rows: int, width: int) -> Cost:
    return work(0, 2 * rows * width, 8 * rows)


def lookup_back(rows: int, width: int, entries: int) -> Cost:
    """Adds each row to one of a dense gradient of the whole table."""
    return work(rows * width, rows * width + entries * width, 8 * rows)


def broadcast_added(large: int, small: int) -> Cost:
    return work(large, 2 * large + small)


def summed(large: int, small: int) -> Cost:
    return work(large, large + small)


PLACES = work(0, 0, 8 * T)  # numbers of the places, or zeros for the segments

Both = tuple[Cost, Cost]


def pre_norm_blocks(
    prefix: str, count: int, samples: int, length: int, kind: tuple[int, int]
) -> dict[str, Both]:
    rows = samples * length
    values = rows * C
    found: dict[str, Both] = {}
    for number in range(count):
        # A norm's backward hands its gradient to the branch's begin, where the other one joins.
        normed = (norm(rows, C), norm_back(rows, C) + added(values))
        found |= {
            f"{prefix}.{number}.norm1": normed,
            f"{prefix}.{number}.attention.qkv": (
                linear(rows, C, 3 * C) + attention(samples, length, C, H),
                attention_back(samples, length, C, H)
                + joined(3 * values)
                + linear_back(rows, C, 3 * C),
            ),
            f"{prefix}.{number}.attention.output": (
                linear(rows, C, C) + added(values),
                linear_back(rows, C, C),
            ),
            f"{prefix}.{number}.norm2": normed,
            f"{prefix}.{number}.feed_forward.hidden": (
                linear(rows, C, 4 * C) + gelu(4 * values, kind),
                gelu_back(4 * values, kind) + linear_back(rows, C, 4 * C),
            ),
            f"{prefix}.{number}.feed_forward.output": (
                linear(rows, 4 * C, C) + added(values),
                linear_back(rows, 4 * C, C),
            ),
        }
    return found


def gpt_costs(tied: bool) -> dict[str, Both]:
    logits, logits_back = linear(R, C, V, bias=False), linear_back(R, C, V, bias=False)
    tokens_back = lookup_back(R, C, V)
    found = {
        "embedding.tokens": (
            PLACES + lookup(R, C),
            tokens_back + added(V * C) if tied else tokens_back,  # both gradients of the weight
        ),
        "embedding.positions": (
            lookup(T, C) + broadcast_added(R * C, T * C),
            summed(R * C, T * C) + lookup_back(T, C, CONTEXT),
        ),
        **pre_norm_blocks("blocks", 2, B, T, TANH),
        "norm": (norm(R, C), norm_back(R, C)),
    }
    if not tied:
        return found | {"head": (logits, logits_back)}
    forward, backward = found["norm"]  # the output layer has no parameter of its own
    return found | {"norm": (forward + logits, backward + logits_back)}


def bert_costs() -> dict[str, Both]:
    values = R * C
    # The gradients of a branch and of what passes it by meet at the norm before them.
    met = (norm(R, C), added(values) + norm_back(R, C))
    found = {
        "embedding.tokens": (PLACES + lookup(R, C), lookup_back(R, C, V) + added(V * C)),
        "embedding.positions": (
            lookup(T, C) + broadcast_added(values, T * C) + PLACES,
            summed(values, T * C) + lookup_back(T, C, CONTEXT),
        ),
        "embedding.segments": (
            lookup(T, C) + broadcast_added(values, T * C),
            summed(values, T * C) + lookup_back(T, C, 2),
        ),
        "embedding.norm": met,
    }
    for number in range(2):
        found |= {
            f"blocks.{number}.attention.qkv": (
                linear(R, C, 3 * C) + attention(B, T, C, H),
                attention_back(B, T, C, H) + joined(3 * values) + linear_back(R, C, 3 * C),
            ),
            f"blocks.{number}.attention.output": (
                linear(R, C, C) + added(values),
                linear_back(R, C, C),
            ),
            f"blocks.{number}.norm1": met,
            f"blocks.{number}.feed_forward.hidden": (
                linear(R, C, 4 * C) + gelu(4 * values, ERF),
                gelu_back(4 * values, ERF) + linear_back(R, C, 4 * C),
            ),
            f"blocks.{number}.feed_forward.output": (
                linear(R, 4 * C, C) + added(values),
                linear_back(R, 4 * C, C),
            ),
            f"blocks.{number}.norm2": met,
        }
    return found | {
        "blocks.1.norm2": (norm(R, C), norm_back(R, C)),  # nothing passes the head by
        "head.hidden": (
            linear(R, C, C) + gelu(values, ERF),
            gelu_back(values, ERF) + linear_back(R, C, C),
        ),
        "head.norm": (norm(R, C), norm_back(R, C)),
        "head.output": (linear(R, C, V), linear_back(R, C, V)),
    }


CLASSES, IMAGE, PATCH = 5, (3, 8, 12), 4


def vit_costs() -> dict[str, Both]:
    patches = (IMAGE[1] // PATCH) * (IMAGE[2] // PATCH)
    length, pixels = 1 + patches, IMAGE[0] * PATCH * PATCH
    rows, of_patches = B * length, B * patches * C
    values = rows * C
    convolution = work(2 * B * patches * pixels * C, B * prod(IMAGE) + pixels * C + C + of_patches)
    # Without a gradient of the images.
    convolution_back = work(
        2 * B * patches * pixels * C + of_patches,
        of_patches + B * prod(IMAGE) + 2 * pixels * C + C,
    )
    found = {
        "embedding": (Cost(), summed(values, length * C) + summed(B * C, C)),
        "embedding.patches": (
            convolution
            + work(0, C + of_patches + values)  # the class token is read once
            + broadcast_added(values, length * C),
            convolution_back,
        ),
        **pre_norm_blocks("blocks", 2, B, length, ERF),
        "norm": (norm(B, C), norm_back(B, C)),
        "head": (linear(B, C, CLASSES), linear_back(B, C, CLASSES)),
    }
    # The class token's gradient becomes that of all tokens, which are zero.
    forward, backward = found["blocks.1.feed_forward.output"]
    found["blocks.1.feed_forward.output"] = (forward, work(0, B * C + values) + backward)
    return found


def gpt(**options: Any) -> GPT:
    return GPT(V, context=CONTEXT, width=C, num_layers=2, num_heads=H, **options)


def bert() -> BERT:
    return BERT(V, context=CONTEXT, width=C, num_layers=2, num_heads=H)


def vit() -> ViT:
    return ViT(CLASSES, image=IMAGE, patch=PATCH, width=C, num_layers=2, num_heads=H)


TOKENS = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(0))
IMAGES = torch.zeros(B, *IMAGE)
CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, dict[str, Both]]] = {
    "gpt": (gpt, TOKENS, gpt_costs(tied=True)),
    "gpt-untied": (lambda: gpt(tied=False), TOKENS, gpt_costs(tied=False)),
    "bert": (bert, TOKENS, bert_costs()),
    "vit": (vit, IMAGES, vit_costs()),
}


@pytest.mark.parametrize("case", CASES)
def test_layers_cost_what_is_counted_by_hand(case: str) -> None:
    make, batch, by_hand = CASES[case]
    found = {layer.name: layer for layer in describe(make(), batch).layers}
    assert list(found) == list(by_hand)
    for name, (forward, backward) in by_hand.items():
        assert (name, found[name].forward.flops) == (name, forward.flops)
        assert (name, found[name].forward.nbytes) == (name, forward.nbytes)
        assert (name, found[name].backward.flops) == (name, backward.flops)
        assert (name, found[name].backward.nbytes) == (name, backward.nbytes)


@pytest.mark.parametrize("case", CASES)
def test_layers_add_up_to_the_whole_real_step(case: str) -> None:
    make, batch, _ = CASES[case]
    model = make()
    workload = describe(model, batch)
    with CostCounter() as forward:
        outputs = model(batch)
    gradient = torch.ones_like(outputs)
    with CostCounter() as backward:
        outputs.backward(gradient)
    for phase, counter in (("forward", forward), ("backward", backward)):
        costs = [getattr(layer, phase) for layer in workload.layers]
        assert counter.counts == (
            sum(cost.flops for cost in costs),
            sum(cost.nbytes for cost in costs),
            sum(cost.num_calls for cost in costs),
        )


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


def output(args: Sequence[Any], out: Any) -> int:
    return out.numel()


PRICES: dict[str, Callable[[Sequence[Any], Any], int]] = {
    # Products of (n, k) and (k, m).
    "addmm": lambda args, out: 2 * prod(args[1].shape) * args[2].shape[1],
    "mm": lambda args, out: 2 * prod(args[0].shape) * args[1].shape[1],
    "bmm": lambda args, out: 2 * prod(args[0].shape) * args[1].shape[2],
    "convolution": lambda args, out: 2 * out.numel() * args[1][0].numel(),
    "convolution_backward": lambda args, out: args[0].numel() * (2 * args[2][0].numel() + 1),
    # q (B, H, T, D).
    "_scaled_dot_product_flash_attention_for_cpu": lambda args, out: (
        2 * 2 * args[0].numel() * args[1].shape[2]
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda args, out: (
        5 * 2 * args[1].numel() * args[2].shape[2]
    ),
    "_safe_softmax": lambda args, out: 5 * out.numel(),
    "_softmax_backward_data": lambda args, out: 4 * out.numel(),
    "native_layer_norm": lambda args, out: 8 * args[0].numel(),
    "native_layer_norm_backward": lambda args, out: 13 * args[0].numel(),
    "sum": lambda args, out: args[0].numel(),
    "embedding_dense_backward": lambda args, out: args[0].numel(),
    # One for each value of the result.
    **dict.fromkeys(("add", "mul", "div_", "where", "bernoulli_"), output),
    # Moves, and what has no arithmetic.
    **dict.fromkeys(
        ("embedding", "cat", "clone", "arange", "zeros_like", "ones", "ones_like", "tril"),
        lambda args, out: 0,
    ),
    **dict.fromkeys(
        ("scalar_tensor", "empty_like", "select_backward"),
        lambda args, out: 0,
    ),
}
GELU = {"gelu": {"none": 5, "tanh": 13}, "gelu_backward": {"none": 11, "tanh": 22}}
VIEWS = {"view", "_unsafe_view", "t", "transpose", "expand", "split", "slice", "select", "detach"}


class Priced(TorchDispatchMode):
    """Compares the price of each operation with the one of the table here."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        self.names.add(name)
        if name in GELU:
            expected = GELU[name][kwargs.get("approximate", "none")] * out.numel()
        elif name not in VIEWS:
            expected = PRICES[name](args, out)
        else:
            return out
        assert (name, flops_of(func, args, kwargs, out)) == (name, expected)
        return out


@pytest.mark.parametrize(
    ("make", "options", "batch"),
    [
        (gpt, {}, TOKENS),
        (gpt, {"dropout": 0.1, "tied": False}, TOKENS),
        (bert, {}, TOKENS),
        (vit, {}, IMAGES),
    ],
    ids=["gpt", "gpt with dropout", "bert", "vit"],
)
def test_every_operation_has_a_price_of_its_own(
    make: Callable[..., nn.Module], options: dict[str, Any], batch: Tensor
) -> None:
    model = make(**options)
    with Priced() as priced:
        outputs = model(batch)
        outputs.backward(torch.ones_like(outputs))
    assert {"native_layer_norm", "native_layer_norm_backward", "gelu_backward"} <= priced.names


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


@pytest.mark.parametrize("name", ["gpt2", "gpt-30m-untied", "bert-base", "vit-b-16"])
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
