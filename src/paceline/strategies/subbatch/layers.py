"""The sharded layers of a head: forward and backward of a rank's outputs, without autograd between.

A linear layer needs its whole input. Its gradients by the input are partial sums, which have to be
added up over all ranks. What follows it, and a BatchNorm1d, work on this rank's outputs alone. The
statistics of a BatchNorm1d are those of a sub-batch.

Within torch.autocast products are computed in its type; all that is added up, travels or follows
has the type of the weights.
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
    """Return the seed of a dropout's mask, by the dropout's name in the model and the step.

    `seed` is that of the run; steps count from 0.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{name}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


class DropoutMasks:
    """The dropout masks of a step, whose batch has `num_rows` rows over all ranks.

    A mask is the one that `nn.Dropout` draws for the whole batch, in rank order, and all outputs,
    on a CPU, right after `torch.manual_seed(dropout_seed(seed, step, name))`. Each rank draws it
    whole, which costs little beside a linear layer, and takes its rows and columns. So the masks
    depend neither on the number of workers nor on the sub-batches, and one process with plain
    `nn.Dropout` has the same.
    """

    def __init__(self, seed: int, step: int, num_rows: int) -> None:
        self._seed, self._step, self._num_rows = seed, step, num_rows
        self._drawn: dict[str, Tensor] = {}

    def noise(
        self, name: str, p: float, num_outputs: int, rows: Tensor, shard: Shard, like: Tensor
    ) -> Tensor:
        """Return the factors of these rows of the batch: zeros, and 1 / (1 - p).

        `like` has as many rows, and the shard's columns of all `num_outputs`.
        """
        if name not in self._drawn:
            source = torch.Generator().manual_seed(dropout_seed(self._seed, self._step, name))
            kept = torch.empty(self._num_rows, num_outputs).bernoulli_(1 - p, generator=source)
            self._drawn[name] = kept.bool()
        noise = shard(self._drawn[name], dim=1)[rows].to(like)
        return noise if p in (0, 1) else noise.div_(1 - p)


@dataclass
class _Saved:
    """The tensors of a sub-batch that a layer keeps until backward."""

    inputs: Tensor
    leaf: Tensor
    outputs: Tensor
    leaf_gradients: Tensor | None = None


class HeadLayer:
    """A layer of the head on this rank, whose module has this rank's outputs alone.

    Sub-batches are told apart by their `number`.
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
        """Return a sub-batch's outputs (N, own), and save what backward needs.

        `inputs` are (N, all) of a linear layer, and otherwise (N, own); `rows` are their places in
        the step's batch.
        """
        if self.is_linear:
            leaf = outputs = self._linear(inputs).requires_grad_()
        elif len(inputs) == 1:
            raise InvalidInput(
                "head",
                f"layer {self.name!r} has to normalise a sub-batch of one sample",
                hint="take a larger batch or sub_batch, or fewer workers",
            )
        else:
            leaf = inputs.detach().requires_grad_()
            # No samples have no statistics.
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
        """Return the outputs in evaluation mode: no dropout, and running statistics."""
        self.module.eval()
        outputs = self._linear(inputs) if self.is_linear else self.module(inputs)
        self.module.train()
        for _, module in self._following:
            outputs = outputs if isinstance(module, nn.Dropout) else module(outputs)
        return outputs

    def backward_input(self, number: int, by_outputs: Tensor, scale: float) -> Tensor:
        """Return the gradients by the inputs: this rank's summand of them, if it is linear.

        Those of the parameters of a BatchNorm1d accumulate, `scale` times.
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
        """Accumulate the gradients by the parameters of a linear layer, `scale` times.

        It comes after `backward_input`, whose result is on its way to other ranks meanwhile.
        """
        saved = self._saved.pop(number)
        assert saved.leaf_gradients is not None
        by_leaf = saved.leaf_gradients
        by_weight = (by_leaf.t() @ saved.inputs).to(self.module.weight.dtype)
        found = [by_weight, by_leaf.sum(0)]  # without a bias, the first alone
        _accumulate(self.parameters, found[: len(self.parameters)], scale)

    @torch.no_grad()
    def _linear(self, inputs: Tensor) -> Tensor:
        if inputs.dim() != 2 or inputs.shape[1] != self.module.weight.shape[1]:
            raise InvalidInput(
                "head",
                f"layer {self.name!r} takes (rows, {self.module.weight.shape[1]}), but gets "
                f"{tuple(inputs.shape)}",
                hint="flatten what the body hands on",
            )
        outputs = nn.functional.linear(inputs, self.module.weight, self.module.bias)
        return outputs.to(self.module.weight.dtype)


def _accumulate(
    parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], scale: float
) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        own = gradient if scale == 1.0 else gradient * scale
        parameter.grad = own if parameter.grad is None else parameter.grad.add_(own)
