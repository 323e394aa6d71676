"""Dtypes and layouts: mixed precision, complex, sparse, channels last."""

from typing import Any

import torch
import torch.nn.functional as F
from declared import plain, program, programs, trains
from torch import Tensor, nn

from steps import backward, mlp, module_of, sgd, squares, stepped, trained, zeroed
from trial import OURS, Trial


def _narrow(trial: Trial, dtype: torch.dtype = torch.float32) -> Any:
    return lambda model, step: model(trial.batch(step, dtype=dtype)).float().square().mean()


programs(
    __name__,
    {
        "float32": plain(lambda: mlp().float(), steps=5, loss=_narrow),
        "bfloat16_module": plain(
            lambda: mlp().bfloat16(), loss=lambda trial: _narrow(trial, torch.bfloat16)
        ),
        "float16_module": plain(
            lambda: mlp().half(), loss=lambda trial: _narrow(trial, torch.float16)
        ),
        "autocast_inside_the_module": plain(
            lambda: module_of(net=mlp().float())(
                torch.autocast("cpu", dtype=torch.bfloat16)(lambda self, x: self.net(x))
            ),
            loss=_narrow,
        ),
        # Norms in float32, layers in bfloat16, a head in float64.
        "parameters_of_several_types": plain(
            lambda: module_of(
                first=nn.Linear(6, 8).bfloat16(), norm=nn.LayerNorm(8).float(), head=nn.Linear(8, 2)
            )(lambda self, x: self.head(self.norm(self.first(x.bfloat16()).float()).double())),
            steps=4,
        ),
        "complex_parameters": plain(
            lambda: module_of(filter=nn.Parameter(torch.randn(4).to(torch.complex128)), net=mlp())(
                lambda self, x: self.net(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=6))
            )
        ),
        "parameters_without_elements_or_dimensions": plain(
            lambda: module_of(
                net=mlp(),
                scalar=nn.Parameter(torch.tensor(0.5)),
                empty=nn.Parameter(torch.zeros(0, 3)),
            )(lambda self, x: self.net(x) * self.scalar + self.empty.sum())
        ),
    },
)


@trains(lambda: mlp().float())
def autocast_to_bfloat16_around_the_wrapper(trial, model, step):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(trial.batch(step, dtype=torch.float32))
    assert out.dtype == torch.bfloat16
    return out.float().square().mean()


@trains(lambda: mlp().float())
def gradient_scaler(trial, model):
    """Start with too large a scale, for which all ranks skip steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
    optimizer = sgd(model)
    for step in range(6):
        optimizer.zero_grad()
        loss = _narrow(trial)(model, step)
        scaler.scale(loss * 2**5).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield [loss, norm, scaler.get_scale()]


def gradients_infinite_on_one_rank(trial, model):
    """An infinite gradient on one rank is infinite on all ranks."""
    for step in zeroed(model, 3):
        factor = float("inf") if step == 1 and trial.rank == 1 else 1.0
        yield backward(model(trial.batch(step)).square().mean() * factor)


@trains(lambda: mlp().float())
def gradients_very_small(trial, model):
    """Means of denormal numbers, in float32."""
    for step in zeroed(model, 2):
        yield backward(_narrow(trial)(model, step) * 1e-30 * 1e-8)


def sparse_embedding(trial):
    """Sparse gradients stay sparse, with the rows of all ranks."""
    module = nn.Sequential(nn.Embedding(20, 6, sparse=True), nn.Flatten(), nn.Linear(18, 2))
    model = trial.wrap(module)
    optimizers = [
        torch.optim.SparseAdam(list(module[0].parameters()), lr=0.05),
        sgd(module[2]),
    ]
    for step in stepped(optimizers, 4):
        words = trial.batch(step, 4, 3).mul(10).long().abs() % 20
        model(words).square().mean().backward()
        yield module[0].weight.grad.is_sparse


def sparse_gradients_only(trial):
    """Without dense gradients, an exchange has nothing to open."""
    model = trial.wrap(nn.Embedding(20, 6, sparse=True))
    for step in stepped(torch.optim.SGD(model.parameters(), lr=0.1), 3):
        words = trial.batch(step, 4, 3).mul(10).long().abs() % 20
        yield backward(model(words).square().mean())


@program(raises="RuntimeError", better="a sparse weight that no rank has used is left alone")
def sparse_embedding_bag_with_unused_parameters_sought(trial):
    @module_of(
        bags=nn.ModuleList(nn.EmbeddingBag(10, 4, mode="sum", sparse=True) for _ in range(2)),
        head=nn.Linear(4, 2),
    )
    def bags(self, words: Tensor, which: int) -> Tensor:
        return self.head(self.bags[which](words))

    model = trial.wrap(bags, find_unused_parameters=True)
    for step, which in stepped(torch.optim.SGD(model.parameters(), lr=0.1), enumerate([0, 0, 1])):
        words = trial.batch(step, 4, 3).mul(10).long().abs() % 10
        yield backward(model(words, which).square().mean())


def channels_last(trial):
    """Gradients have their parameters' strides."""
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3, stride=2)
    ).to(memory_format=torch.channels_last)
    model = trial.wrap(module)
    for step in stepped(model, 3):
        x = trial.batch(step, 2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
        model(x).square().mean().backward()
        yield [list(parameter.grad.stride()) for parameter in model.parameters()]


def parameters_that_are_not_contiguous(trial):
    """A transposed weight and an expanded gradient."""

    @module_of(
        weight=nn.Parameter(torch.randn(3, 6).t()),
        bias=nn.Parameter(torch.randn(3)),
        scale=nn.Parameter(torch.ones(4, 5)),
    )
    def transposed(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias + self.scale.sum()

    model = trial.wrap(transposed)
    for step in stepped(model, 3):
        model(trial.batch(step)).sum().backward()
        yield [list(parameter.grad.stride()) for parameter in model.parameters()]


def thousand_small_parameters(trial):
    @module_of(scales=nn.ParameterList(torch.randn(3) for _ in range(300)), net=mlp())
    def many(self, x: Tensor) -> Tensor:
        out = self.net(x)
        for scale in self.scales:
            out = (out * scale).tanh() + scale
        return out

    yield from trained(trial.wrap(many), squares(trial))


@program(exact_by=OURS)
def converted_after_wrapping(trial):
    """After model.double(), DDP silently stops exchanging gradients."""
    model = trial.wrap(mlp().float(), watched=False)
    for step in range(4):
        dtype = torch.float32 if step < 2 else torch.float64
        model.to(dtype)
        model.zero_grad()
        model(trial.share(step).to(dtype)).square().mean().backward()
        yield [p.grad.float() for p in model.parameters()]  # may still be exchanged in float32


@program(raises="RuntimeError", refused_by=OURS, refusal="mixed_precision")
def mixed_precision_of_ddp(trial):
    """DDP's mixed precision, which requires an accelerator's streams."""
    from torch.nn.parallel.distributed import _MixedPrecision

    half = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = trial.wrap(mlp().float(), mixed_precision=half)
    yield from trained(model, _narrow(trial))


def segmentation_with_class_weights(trial):
    """A small U-net, in float32, with two losses and a buffer of class weights."""

    @module_of(
        down=nn.Conv2d(1, 4, 3, padding=1),
        norm=nn.BatchNorm2d(4),
        deep=nn.Conv2d(4, 4, 3, padding=1),
        up=nn.ConvTranspose2d(4, 4, 2, stride=2),
        head=nn.Conv2d(8, 3, 1),
        weights=nn.Buffer(torch.tensor([0.2, 1.0, 2.0])),
    )
    def unet(self, x: Tensor) -> Tensor:
        high = self.norm(self.down(x)).relu()
        low = self.deep(F.max_pool2d(high, 2)).relu()
        return self.head(torch.cat([high, self.up(low)], 1))

    def loss_of(model: nn.Module, step: int) -> Tensor:
        x = trial.batch(step, 2, 1, 8, 8, dtype=torch.float32)
        labels = x[:, 0].mul(3).long().abs() % 3
        out = model(x)
        dice = 1 - out.softmax(1)[:, 1].mean()
        return F.cross_entropy(out, labels, weight=unet.weights) + dice

    yield from trained(trial.wrap(unet.float()), loss_of)
