"""Compute outputs and gradients of the head (a model's last layers) on one rank.

A rank computes some outputs of every layer. Autograd runs only within a layer; the caller passes
gradients from layer to layer. A linear layer reads inputs that are gathered from all ranks. The
gradients of these inputs are a sum over ranks, and each rank computes one summand. Activation
functions and BatchNorm1d read only the rank's own features. BatchNorm1d computes the statistics of
a sub-batch.

With torch.autocast, matrix products have autocast's dtype; sums, messages and other layers have the
weights' dtype.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.core.errors import InvalidInput
from paceline.training.models.chained_head import TracedLayer
from paceline.training.models.sharded import Shard, Sharding


def dropout_seed(seed: int, step: int, name: str) -> int:
    """Return the seed for the mask of dropout module `name` in a step; `seed`: the run's seed."""
    digest = hashlib.sha256(f"{seed}/{step}/{name}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


class DropoutMasks:
    """The dropout masks of a step; `num_rows`: number of rows in the batch of all ranks.

    Every rank draws the mask of the whole batch, and uses its part; drawing takes little time.
    The mask equals that of `nn.Dropout` on a CPU after
    `torch.manual_seed(dropout_seed(seed, step, name))`, for the batch in rank order.
    """

    def __init__(self, seed: int, step: int, num_rows: int) -> None:
        self._seed, self._step, self._num_rows = seed, step, num_rows
        self._drawn: dict[str, Tensor] = {}

    def noise(
        self, name: str, p: float, num_outputs: int, rows: Tensor, shard: Shard, like: Tensor
    ) -> Tensor:
        """Return the factors 0 or 1 / (1 - p) for the outputs of `shard`, in the dtype of `like`.

        `name`: name of the dropout module. `p`: its probability. `num_outputs`: outputs of the
        whole layer. `rows`: indices of the rows in the batch.
        """
        if name not in self._drawn:
            source = torch.Generator().manual_seed(dropout_seed(self._seed, self._step, name))
            kept = torch.empty(self._num_rows, num_outputs).bernoulli_(1 - p, generator=source)
            self._drawn[name] = kept.bool()
        noise = shard(self._drawn[name], dim=1)[rows].to(like)
        return noise if p in (0, 1) else noise.div_(1 - p)


@dataclass
class _Saved:
    """The tensors that a layer keeps for the backward pass of a sub-batch.

    `leaf`: the tensor where autograd's graph begins: a linear layer's outputs or a BatchNorm1d's
    inputs.
    """

    inputs: Tensor
    leaf: Tensor
    outputs: Tensor
    leaf_gradients: Tensor | None = None


class HeadLayer:
    """Computes this rank's outputs of a layer of the head (last layers), sub-batch by sub-batch.

    The argument `number` of its methods is the number of the sub-batch.
    """

    def __init__(self, traced: TracedLayer, sharding: Sharding, rank: int) -> None:
        self.name, self.module, self.sharding = traced.name, traced.module, sharding
        self.is_linear = isinstance(traced.module, nn.Linear)
        self.shard = sharding.shard(rank)
        self._following = traced.following
        self._saved: dict[int, _Saved] = {}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """This rank's parameters of the layer."""
        return list(self.module.parameters())

    def forward(self, number: int, inputs: Tensor, rows: Tensor, masks: DropoutMasks) -> Tensor:
        """Return this rank's outputs for the N rows of a sub-batch; keep tensors for backward.

        `inputs`: all features (N, features) for a linear layer; for other layers, only this rank's
        features. `rows`: indices of the sub-batch's rows in the batch.
        """
        if self.is_linear:
            leaf = outputs = self._linear(inputs).requires_grad_()
        elif len(inputs) == 1:
            raise InvalidInput(
                "sub_batch",
                f"must be at least 2 for BatchNorm1d {self.name!r}",
                hint="use a larger batch or sub_batch, or fewer workers",
            )
        else:
            leaf = inputs.detach().requires_grad_()
            # BatchNorm1d cannot compute statistics of zero rows, so an empty sub-batch skips it.
            weight, bias = self.module.weight, self.module.bias
            outputs = self.module(leaf) if len(leaf) else leaf * weight + bias
        with torch.enable_grad():
            for name, module in self._following:
                if not isinstance(module, nn.Dropout):
                    outputs = module(outputs)
                elif module.p:
                    whole, shard = self.sharding.num_outputs, self.shard
                    outputs = outputs * masks.noise(name, module.p, whole, rows, shard, outputs)
        self._saved[number] = _Saved(inputs, leaf, outputs)
        return outputs.detach()

    @torch.no_grad()
    def evaluate(self, inputs: Tensor) -> Tensor:
        """Return this rank's outputs in evaluation mode."""
        self.module.eval()
        outputs = self._linear(inputs) if self.is_linear else self.module(inputs)
        self.module.train()
        for _, module in self._following:
            outputs = outputs if isinstance(module, nn.Dropout) else module(outputs)
        return outputs

    def backward_input(self, number: int, by_outputs: Tensor, scale: float) -> Tensor:
        """Return the input gradients; for a linear layer, the caller must sum them over ranks.

        `by_outputs`: gradients of the layer's outputs. For a BatchNorm1d, also adds `scale`
        times its parameter gradients to the existing gradients.
        """
        saved = self._saved[number]
        if not self.is_linear:
            own = self.parameters
            found = torch.autograd.grad(saved.outputs, [saved.leaf, *own], by_outputs)
            _accumulate(own, found[1:], scale)
            del self._saved[number]
            return found[0]
        saved.leaf_gradients = by_outputs
        if saved.outputs is not saved.leaf:
            [saved.leaf_gradients] = torch.autograd.grad(saved.outputs, [saved.leaf], by_outputs)
        return (saved.leaf_gradients @ self.module.weight.detach()).to(by_outputs.dtype)

    @torch.no_grad()
    def backward_weight(self, number: int, scale: float) -> None:
        """Add `scale` times a linear layer's parameter gradients to the existing gradients.

        Call it after `backward_input` of the same sub-batch.
        """
        saved = self._saved.pop(number)
        assert saved.leaf_gradients is not None
        by_leaf = saved.leaf_gradients
        by_weight = (by_leaf.t() @ saved.inputs).to(self.module.weight.dtype)
        found = [by_weight, by_leaf.sum(0)]
        _accumulate(self.parameters, found[: len(self.parameters)], scale)

    @torch.no_grad()
    def _linear(self, inputs: Tensor) -> Tensor:
        if inputs.dim() != 2 or inputs.shape[1] != self.module.weight.shape[1]:
            raise InvalidInput(
                "head",
                f"layer {self.name!r} requires inputs (rows, {self.module.weight.shape[1]})",
                got=tuple(inputs.shape),
                hint="flatten the body's outputs",
            )
        outputs = nn.functional.linear(inputs, self.module.weight, self.module.bias)
        return outputs.to(self.module.weight.dtype)


def _accumulate(
    parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], scale: float
) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        own = gradient if scale == 1.0 else gradient * scale
        parameter.grad = own if parameter.grad is None else parameter.grad.add_(own)
