"""The layers of a head, of which a rank has some outputs: their passes, without autograd between.

A linear layer needs its whole input, and returns the errors of all of it: partial sums, which
become errors when all ranks' are added. What follows it, and a BatchNorm1d, work on this rank's
columns alone. Statistics of a BatchNorm1d are those of a sub-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from paceline.core.errors import InvalidInput
from paceline.strategies.subbatch.chain import Link
from paceline.strategies.subbatch.dropout import Masks
from paceline.strategies.subbatch.head import shares
from paceline.strategies.subbatch.loss import Columns


@dataclass(frozen=True)
class Widths:
    """How a layer's outputs are shared: `parts` are those of all ranks, in rank order."""

    parts: tuple[int, ...]

    @classmethod
    def of(cls, outputs: int, workers: int) -> "Widths":
        """Return shares as equal as possible, the larger ones first."""
        return cls(tuple(shares(outputs, workers)))

    @property
    def whole(self) -> int:
        """All outputs."""
        return sum(self.parts)

    def columns(self, rank: int) -> Columns:
        """Return those of a rank."""
        firsts = [0, *accumulate(self.parts)]
        return Columns(firsts[rank], self.parts[rank])


@dataclass(frozen=True)
class Rows:
    """The places of a sub-batch's samples in the step's batch, and the step's masks."""

    places: Sequence[int]
    masks: Masks


@dataclass
class _Kept:
    """What a pass leaves in a layer until its backward."""

    inputs: Tensor
    leaf: Tensor
    outputs: Tensor
    errors: Tensor | None = None


class Stage:
    """A layer of the head on this rank, whose module has this rank's outputs alone.

    `widths` are those of all ranks, of the layer's outputs.
    """

    def __init__(self, link: Link, widths: Widths, rank: int) -> None:
        self.name, self.module, self.widths = link.name, link.module, widths
        self.is_linear = isinstance(link.module, nn.Linear)
        self.columns = widths.columns(rank)
        self._after = link.after
        self._kept: dict[int, _Kept] = {}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """This rank's parameters of the layer."""
        return list(self.module.parameters())

    def forward(self, number: int, inputs: Tensor, rows: Rows) -> Tensor:
        """Return the outputs (N, own) of the pass of that number, and keep what backward needs.

        `inputs` are (N, all) of a linear layer, and otherwise (N, own).
        """
        if self.is_linear:
            leaf = self._linear(inputs).requires_grad_()
            outputs = leaf
        else:
            leaf = inputs.detach().requires_grad_()
            outputs = self._normalized(leaf)
        with torch.enable_grad():
            for name, module in self._after:
                outputs = self._apply(name, module, outputs, rows)
        self._kept[number] = _Kept(inputs, leaf, outputs)
        return outputs.detach()

    @torch.no_grad()
    def tested(self, inputs: Tensor) -> Tensor:
        """Return the outputs of a model that is tested: no dropout, and statistics as learnt."""
        self.module.eval()
        outputs = self._linear(inputs) if self.is_linear else self.module(inputs)
        self.module.train()
        for _, module in self._after:
            outputs = outputs if isinstance(module, nn.Dropout) else module(outputs)
        return outputs

    def errors(self, number: int, of_outputs: Tensor, scale: float) -> Tensor:
        """Return the derivatives by the inputs: this rank's part of their sum, if it is linear.

        Those of the parameters of a BatchNorm1d accumulate, `scale` times.
        """
        kept = self._kept[number]
        if not self.is_linear:
            own = self.parameters
            found = torch.autograd.grad(kept.outputs, [kept.leaf, *own], of_outputs)
            _accumulate(own, found[1:], scale)
            del self._kept[number]
            return found[0]
        by_leaf = of_outputs
        if kept.outputs is not kept.leaf:
            [by_leaf] = torch.autograd.grad(kept.outputs, [kept.leaf], of_outputs)
        kept.errors = by_leaf
        return by_leaf @ self.module.weight.detach()

    @torch.no_grad()
    def weights(self, number: int, scale: float) -> None:
        """Let the derivatives by the parameters of a linear layer accumulate, `scale` times."""
        kept = self._kept.pop(number)
        assert kept.errors is not None
        found = [kept.errors.t() @ kept.inputs]
        if self.module.bias is not None:
            found.append(kept.errors.sum(0))
        own = self.parameters  # weight and, if there is one, bias
        _accumulate(own, found, scale)

    @torch.no_grad()
    def _linear(self, inputs: Tensor) -> Tensor:
        if inputs.dim() != 2 or inputs.shape[1] != self.module.weight.shape[1]:
            raise InvalidInput(
                f"head: layer {self.name!r} takes (samples, {self.module.weight.shape[1]}), "
                f"but gets {tuple(inputs.shape)}; flatten what the body hands on"
            )
        return nn.functional.linear(inputs, self.module.weight, self.module.bias)

    def _normalized(self, leaf: Tensor) -> Tensor:
        if not len(leaf):  # of which there are no statistics
            return leaf * self.module.weight + self.module.bias
        if len(leaf) == 1:
            raise InvalidInput(
                f"head: layer {self.name!r} has to normalise a sub-batch of one sample; take a "
                "larger batch, or fewer workers"
            )
        outputs: Tensor = self.module(leaf)
        return outputs

    def _apply(self, name: str, module: nn.Module, values: Tensor, rows: Rows) -> Tensor:
        if isinstance(module, nn.Dropout):
            if not module.p:
                return values
            whole, first = self.widths.whole, self.columns.first
            return values * rows.masks.noise(name, module.p, whole, rows.places, first, values)
        result: Tensor = module(values)
        return result


def _accumulate(
    parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], scale: float
) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        own = gradient if scale == 1.0 else gradient * scale
        parameter.grad = own if parameter.grad is None else parameter.grad.add_(own)


def stages(links: Sequence[Link], widths: Sequence[Widths], rank: int) -> tuple[Stage, ...]:
    """Return a rank's stages of a head whose modules have been narrowed (`narrow`)."""
    return tuple(Stage(link, one, rank) for link, one in zip(links, widths, strict=True))
