"""Costs found by `describe`, compared with counts by hand and published totals."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.core.workload import Cost, Layer
from paceline.training.models import describe, find
from paceline.training.models.describe import CostCounter
from paceline.training.models.fused_attention import attention_as_on_cpu
from paceline.training.models.transformers import GPT, ViT


def costs_of(model: nn.Module, batch: Tensor) -> Layer:
    """Describe the model and return its last layer."""
    return describe(model, batch).layers[-1]


IMAGES = torch.zeros(2, 3, 7, 6)
VALUES = torch.zeros(2, 3, 4, 5)
STRIDED = 2 * (2 * 5 * 5) * (8 * 3 * 9)


@pytest.mark.parametrize(
    ("model", "batch", "forward", "backward"),
    [
        # Two FLOPs per weight and sample; backward needs no gradient of the input.
        (nn.Linear(4, 3), torch.zeros(2, 4), 2 * 2 * 4 * 3, 2 * 2 * 4 * 3 + 2 * 3),
        *(
            (nn.Sequential(nn.Conv2d(3, 4, 1), convolution), IMAGES, product, 2 * product)
            for convolution, product in (
                (nn.Conv2d(4, 8, 3, groups=2, bias=False), 2 * (2 * 5 * 4) * (8 * 2 * 9)),
                (nn.ConvTranspose2d(4, 6, 3, groups=2, bias=False), 2 * (2 * 7 * 6) * (4 * 3 * 9)),
            )
        ),
        # Backward includes the bias.
        (nn.Conv2d(3, 8, 3, 2, 1), torch.zeros(2, 3, 9, 9), STRIDED, STRIDED + 2 * 8 * 5 * 5),
        (nn.Embedding(1000, 3), torch.zeros(2, 5, dtype=torch.long), 0, 2 * 5 * 3),
        (nn.BatchNorm2d(3).train(), VALUES, 8 * 2 * 3 * 4 * 5, 9 * 2 * 3 * 4 * 5),
        (nn.BatchNorm2d(3).eval(), VALUES, 4 * 2 * 3 * 4 * 5, 6 * 2 * 3 * 4 * 5),
    ],
)
def test_flops_of_layers_equal_counts_by_hand(model, batch, forward, backward):
    layer = costs_of(model, batch)
    assert layer.forward.flops == pytest.approx(forward, abs=1)
    assert layer.backward.flops == backward


def test_the_bytes_of_a_layer_are_its_operands_and_results() -> None:
    layer = costs_of(nn.Linear(4, 3), torch.zeros(2, 4))
    assert layer.forward.nbytes == 4 * (3 + 2 * 4 + 4 * 3 + 2 * 3)  # bias, input, weight, output
    assert (layer.forward.num_calls, layer.activation_nbytes) == (1, 4 * 2 * 3)
    layer = costs_of(nn.Embedding(1000, 3), torch.zeros(2, 5, dtype=torch.long))
    assert layer.forward.nbytes == 8 * 2 * 5 + 2 * (4 * 2 * 5 * 3)  # not the whole table


def test_an_lstm_is_counted_by_hand() -> None:
    steps, samples, inputs, hidden = 5, 4, 96, 256
    products = 2 * steps * samples * 4 * hidden * (inputs + hidden)
    layer = costs_of(nn.LSTM(inputs, hidden), torch.zeros(steps, samples, inputs))
    # Per unit: 4 additions in the gates, three sigmoids of 4, two tanh of 5, 4 in the cell.
    assert layer.forward.flops == products + steps * samples * hidden * (4 + 3 * 4 + 2 * 5 + 4)
    # The CPU kernel computes all gradients, also those of the inputs and of the initial state.
    assert layer.backward.flops == 2 * products
    # Each time step reads the recurrent weights.
    of_states = 4 * 4 * hidden * hidden
    assert steps * of_states < layer.forward.nbytes < steps * of_states + 2e6


def count(operation: Callable[..., Any], *arguments: Any) -> tuple[float, float, int]:
    with CostCounter() as counter:
        operation(*arguments)
    cost = counter.lap().cost
    return cost.flops, cost.nbytes, cost.num_calls


ATEN = torch.ops.aten
X = torch.zeros(2, 3, 8, 6)
ROWS = torch.zeros(2, 8, dtype=torch.long)
Q = torch.zeros(2, 2, 5, 4)
# Operations and their FLOPs for each of 288 values.
PRICES = [
    *((torch.sigmoid, 4), (torch.tanh, 5), (F.silu, 5), (F.softplus, 3), (F.gelu, 5)),
    (lambda x: ATEN.sigmoid_backward(x, x), 3),
    (lambda x: ATEN.tanh_backward(x, x), 3),
    (lambda x: ATEN.silu_backward(x, x), 9),
    (lambda x: ATEN.gelu_backward(x, x), 11),
    (lambda x: ATEN._safe_softmax(x, 1), 5),
    (lambda x: F.log_softmax(x, 1), 5),
    (lambda x: ATEN._softmax_backward_data(x, x, 1, x.dtype), 4),
    (lambda x: ATEN._log_softmax_backward_data(x, x, 1, x.dtype), 4),
    (lambda x: F.group_norm(x, 3), 8),
    (lambda x: F.adaptive_avg_pool2d(x, 2), 1),
    (lambda x: F.adaptive_max_pool2d(x, 2), 1),
    (lambda x: torch.var_mean(x), 4),
    (lambda x: ATEN.embedding_dense_backward(x[:, 0], ROWS, 9, -1, False), 1 / 3),
    *((lambda x: x.var(), 4), (lambda x: x.std(), 4), (lambda x: x.bernoulli_(0.5), 1)),
]


@pytest.mark.parametrize(
    ("operation", "flops", "nbytes"),
    [
        (torch.relu_, 288, 2 * 1152),
        (lambda x: x**2, 288, 2 * 1152),
        (lambda x: x**0.75, 3 * 288, 2 * 1152),
        (lambda x: x.mean((2, 3)), 288, 1152 + 4 * 6),
        (lambda x: F.max_pool2d(x, 2), 4 * 72, 1152 + 72 * (4 + 8)),
        (lambda x: F.avg_pool2d(x, 2, ceil_mode=True), 4 * 72, 1152 + 72 * 4),
        (lambda x: F.avg_pool2d(x, (3, 1), 1), 3 * 216, 1152 + 216 * 4),
        (lambda x: F.layer_norm(x, (6,)), 8 * 288, 2 * 1152 + 2 * 48 * 4),
        (lambda x: x[:, 1:].transpose(1, 2).expand(2, 8, 2, 6).detach(), 0, 0),
        (lambda x: torch.cat([x, x]), 0, 4 * 1152),
        (lambda x: torch.empty_like(x), 0, 0),
        (lambda x: torch.ones_like(x), 0, 1152),
        (lambda x: torch.arange(10) + 1, 0, 80 + 160),
        (lambda x: x[:1].expand(2, 3, 8, 6) + x, 288, 576 + 2 * 1152),
        (lambda x: x[0, 0] @ x[0, 0, 0], 2 * 48, 4 * (48 + 6 + 8)),
        (lambda x: x[0, 0, 0] @ x[0, 0, 1], 2 * 6, 4 * (6 + 6 + 1)),
        (lambda x: F.bilinear(x[0, 0], x[0, 1], torch.zeros(5, 6, 6)), 3 * 8 * 5 * 36, None),
        (lambda x: F.scaled_dot_product_attention(Q, Q, Q), 2 * 2 * (2 * 2 * 5 * 5 * 4), None),
        *((one, 288 * price, None) for one, price in PRICES),
    ],
)
def test_single_operations(operation, flops, nbytes):
    counted = count(operation, X.clone())
    assert counted[0] == pytest.approx(flops)
    assert nbytes is None or counted[1] == nbytes
    assert bool(counted[2]) is (counted[1] > 0)  # views and allocations are no calls


def test_kernels_of_cudnn_are_counted_by_their_shapes() -> None:
    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, device="meta")

    x, channel = zeros(2, 3, 4, 5), zeros(3)
    flops, _, _ = count(ATEN.cudnn_batch_norm_backward, x, x, *[channel] * 5, 1e-5, zeros(0).byte())
    assert flops == 9 * 2 * 3 * 4 * 5
    values, state = zeros(5, 2, 4), zeros(1, 2, 3)
    weights = [zeros(12, 4), zeros(12, 3), zeros(12), zeros(12)]
    lstm = (2, 3, 0, 1, False, 0.0, True, False, [], None)
    flops, _, _ = count(ATEN._cudnn_rnn, values, weights, 4, None, state, state, *lstm)
    assert flops == 2 * 5 * 2 * 12 * (4 + 3)


@pytest.mark.parametrize(
    ("name", "published", "tolerance"),
    [
        ("alexnet", 0.7244e9, 0.01),  # convolutions and linear layers of bvlc_alexnet
        ("vgg16", 15.47e9, 0.005),
        ("googlenet", 1.502e9, 0.08),  # Szegedy et al. 2014, the sum of Table 1
        ("inception-v3", 5.71e9, 0.02),  # torchvision's
        ("resnet18", 1.8e9, 0.03),  # He et al. 2015, Table 1
        ("resnet50", 3.8e9, 0.03),
    ],
)
def test_forward_pass_has_the_published_multiply_adds(name, published, tolerance):
    architecture = find(name)
    with torch.device("meta"):
        model = architecture.build(None)
        workload = describe(model, torch.empty(4, *(architecture.input_shape or ())))
    assert sum(layer.forward.flops for layer in workload.layers) / 2 / 4 == pytest.approx(
        published, rel=tolerance
    )


SMALL = {"width": 12, "num_layers": 2, "num_heads": 2}


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (find("lenet5").build(None), torch.randn(3, 1, 32, 32)),
        (GPT(17, context=14, **SMALL), torch.arange(30).view(3, 10) % 17),
        (ViT(5, image=(3, 8, 12), patch=4, **SMALL), torch.randn(3, 3, 8, 12)),
    ],
    ids=["lenet5", "gpt", "vit"],
)
def test_layers_add_up_to_the_whole_real_step(model: nn.Module, batch: Tensor) -> None:
    layers = describe(model, batch).layers
    with CostCounter() as forward:
        scores = model(batch)
    gradient = torch.ones_like(scores)
    with CostCounter() as backward:
        scores.backward(gradient)
    for phase, counter in (("forward", forward), ("backward", backward)):
        assert counter.lap().cost == sum((getattr(layer, phase) for layer in layers), Cost())


# Transformers. B: samples. T: tokens of a sample. R = B T. C: width. H: number of heads.
# V: vocabulary size.
B, T, C, H, V = 3, 10, 12, 2, 17
R = B * T
TOKENS = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(0))


def linear(inputs: int, outputs: int, bias: bool = True) -> tuple[int, int]:
    """Return the FLOPs of forward (a product) and backward (two, and the sum for the bias)."""
    product = 2 * R * inputs * outputs
    return product, 2 * product + bias * R * outputs


def plus(one: tuple[int, int], forward: int, backward: int) -> tuple[int, int]:
    return one[0] + forward, one[1] + backward


@pytest.mark.parametrize("tied", [True, False])
def test_flops_of_gpt_equal_counts_by_hand(tied: bool) -> None:
    values, scores = R * C, 2 * R * T * C
    norm, logits = (8 * values, 13 * values), linear(C, V, bias=False)
    block = {
        # After a norm's backward, the gradients of both residual branches are added.
        "norm1": plus(norm, 0, values),
        # A causal mask saves nothing: the CPU kernel skips only whole blocks of 512 keys.
        "attention.qkv": plus(linear(C, 3 * C), 2 * scores, 5 * scores),
        "attention.output": plus(linear(C, C), values, 0),
        "norm2": plus(norm, 0, values),
        "feed_forward.hidden": plus(linear(C, 4 * C), 13 * 4 * values, 22 * 4 * values),  # GELU
        "feed_forward.output": plus(linear(4 * C, C), values, 0),
    }
    by_hand = {
        "embedding.tokens": (0, values + (V * C if tied else 0)),  # sums both gradients
        "embedding.positions": (values, values + T * C),
        **{f"blocks.{n}.{name}": costs for n in range(2) for name, costs in block.items()},
        # With tied weights, the output layer has no parameter, so `norm` has its costs.
        "norm": plus(norm, *logits) if tied else norm,
        **({} if tied else {"head": logits}),
    }
    model = GPT(V, context=14, width=C, num_layers=2, num_heads=H, tied=tied)
    layers = describe(model, TOKENS).layers
    assert {one.name: (one.forward.flops, one.backward.flops) for one in layers} == by_hand


FUSED = "_scaled_dot_product_flash_attention_for_cpu"
Made = tuple[str, list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]]


class Operations(TorchDispatchMode):
    """Records each operation with the shapes, strides and types of its results."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Made] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        several = result if isinstance(result, tuple | list) else [result]
        tensors = [(tuple(t.shape), t.stride(), t.dtype) for t in several if isinstance(t, Tensor)]
        self.made.append((func.overloadpacket.__name__, tensors))
        return result


def attended(
    device: str,
    *,
    mask: Tensor | None = None,
    dims: int = 4,
    heads: int = 6,
    value_depth: int = 4,
    dtype: torch.dtype = torch.float32,
    strided: bool = False,
    **options: Any,
) -> list[Made]:
    q, k, v = (
        torch.zeros(2, count, 5, depth, device=device, dtype=dtype, requires_grad=True)
        for count, depth in ((6, 4), (heads, 4), (heads, value_depth))
    )
    if dims == 3:
        q, k, v = q[0], k[0], v[0]
    if strided:  # the last dimension is not dense
        q = torch.zeros(2, 6, 4, 5, device=device, requires_grad=True).transpose(2, 3)
    if mask is not None:
        mask = mask.to(device).detach().requires_grad_(mask.requires_grad)
    with Operations() as operations:
        result = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
        result.backward(torch.ones_like(result))
    return operations.made


CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "plain": (True, {}),
    "causal": (True, {"is_causal": True}),
    "scaled": (True, {"scale": 0.3}),
    "bool mask": (True, {"mask": torch.ones(2, 1, 1, 5, dtype=torch.bool)}),
    "float mask": (True, {"mask": torch.zeros(5, 5)}),
    "bfloat16": (True, {"dtype": torch.bfloat16, "is_causal": True}),
    "float64": (True, {"dtype": torch.float64}),
    "grouped heads": (True, {"heads": 3, "enable_gqa": True, "is_causal": True}),
    "trained mask": (False, {"mask": torch.zeros(5, 5, requires_grad=True)}),
    "three dimensions": (False, {"dims": 3}),
    "other depth of values": (False, {"value_depth": 8}),
    "strided": (False, {"strided": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_meta_runs_the_operations_of_the_cpu(case: str) -> None:
    is_fused, options = CASES[case]
    real = attended("cpu", **options)
    with attention_as_on_cpu():
        meta = attended("meta", **options)
    assert meta == real
    assert (FUSED in [name for name, _ in real]) is is_fused


def test_attention_with_dropout_and_after_the_context_is_unchanged() -> None:
    before = attended("meta")
    with pytest.raises(KeyError), attention_as_on_cpu():
        raise KeyError
    with attention_as_on_cpu():
        assert attended("meta") != before
        # PyTorch draws the mask of dropout with another operation on meta tensors.
        assert FUSED not in [name for name, _ in attended("meta", dropout_p=0.1)]
    assert attended("meta") == before


def test_threads_describe_at_the_same_time() -> None:
    model = GPT(17, context=64, width=32, num_layers=2, num_heads=2)
    batch = torch.zeros(2, 64, dtype=torch.int64)
    expected = describe(model, batch)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: describe(model, batch), range(8))) == [expected] * 8
