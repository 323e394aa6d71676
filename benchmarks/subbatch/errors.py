"""Measure the errors of the four 8-bit types (Dettmers 2016, table 2, MNIST).

The network of section 3.4 (1,024 hidden ReLU units, dropout of 0.2, 0.3 and 0.3, RMSProp at 0.003)
learns the digits in float32. In the last epoch, copies of all tensors that model-parallel layers or
data-parallel workers would exchange are encoded and decoded; training continues with the originals.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from figures import table
from paceline.codecs.blockwise import EightBit
from paceline.codecs.codec import Codec
from paceline.codecs.quantization import TABLES
from paceline.training.data import ShardedBatches, load

_EPOCHS, _BATCH_SIZE, _LEARNING_RATE = 30, 64, 0.003
_HIDDEN, _NUM_CLASSES, _DROPOUT = 1024, 10, (0.2, 0.3, 0.3)
_OFFSET = 10.0  # "while other numbers used an exponent offset of 10^1"
_BLOCKS, _WHOLE = "blocks", "whole"
_SCALED = ("dynamic8", "linear8")  # section 3.4 divides values by the tensor's largest magnitude
# Table 2, "MNIST model parallel" and "MNIST data parallel": relative errors of three layers in %.
_PRINTED = {
    "activations": {
        "dynamic8": "0.5 / 2 / 2",
        "linear8": "1 / 2 / 3",
        "mantissa8": "1.5 / 2 / 8",
        "static8": "1 / 2 / 6",
    },
    "gradients": {
        "dynamic8": "3 / 4 / 5",
        "linear8": "5 / 6 / 6",
        "mantissa8": "4.5 / 4.5 / 6",
        "static8": "4 / 4 / 5",
    },
}
_KEYS = ("what", "layer", "type", "scale")
_LAYERS = ("input", "hidden", "scores")
_PARAMETERS = ("first.weight", "first.bias", "last.weight", "last.bias")


@dataclass
class _Errors:
    """Relative errors of nonzero values that were encoded and decoded."""

    count: int = 0
    total: float = 0.0

    def add(self, values: Tensor, coded: Tensor) -> None:
        """Add the errors of the decoded values `coded`."""
        values, coded = values[values != 0].double(), coded[values != 0].double()
        self.count += len(values)
        self.total += float(((coded - values) / values).abs().sum())


class _Seen(nn.Module):
    """The network; `seen` has the layers' outputs of the last forward in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, _HIDDEN), nn.Linear(_HIDDEN, _NUM_CLASSES)
        self.drops = nn.ModuleList(nn.Dropout(share) for share in _DROPOUT)
        self.seen: dict[str, Tensor] = {}

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores."""
        inputs = self._noted("input", self.drops[0](images.flatten(1)))
        hidden = self._noted("hidden", self.drops[1](self.first(inputs).relu()))
        # In 784x1024x10, only the scores are left for the third dropout share.
        return self._noted("scores", self.drops[2](self.last(hidden)))

    def _noted(self, name: str, values: Tensor) -> Tensor:
        if self.training:
            values.requires_grad_().retain_grad()
            self.seen[name] = values
        return values


def measure(quick: bool) -> dict[str, Any]:
    """Return mean errors by purpose, layer, type and scale, and the test accuracy."""
    epochs = 1 if quick else _EPOCHS
    torch.manual_seed(0)
    digits, model = load("digits"), _Seen()
    found: dict[tuple[str, str, str, str], _Errors] = {}

    def look() -> None:
        for what, of, tensor in _travelling(model):
            for name, scale, codec in _codecs(tensor):
                errors = found.setdefault((what, of, name, scale), _Errors())
                flat = tensor.flatten()
                errors.add(flat, codec.decode(codec.encode(flat)))

    _train(model, digits.train[:], epochs, look)
    model.eval()
    images, labels = digits.test[:]
    with torch.no_grad():
        accuracy = float((model(images).argmax(1) == labels).double().mean())
    rows = [
        dict(zip(_KEYS, key, strict=True)) | {"relative": errors.total / errors.count}
        for key, errors in found.items()
    ]
    return {"epochs": epochs, "accuracy": accuracy, "rows": rows}


def _travelling(model: _Seen) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (purpose, layer or parameter, values) of all tensors that workers would exchange."""
    for layer, values in model.seen.items():
        yield "activations", layer, values.detach()
        yield "activation_gradients", layer, values.grad
    for name, parameter in model.named_parameters():
        yield "gradients", name, parameter.grad


def _codecs(values: Tensor) -> Iterator[tuple[str, str, Codec]]:
    """Yield each type with block scales, as in Paceline, and one scale (section 3.4)."""
    largest = float(values.abs().max())
    for name in TABLES:
        yield name, _BLOCKS, EightBit(name)
        if largest:
            yield name, _WHOLE, EightBit(name, offset=largest if name in _SCALED else _OFFSET)


def _train(
    model: nn.Module, samples: tuple[Tensor, Tensor], epochs: int, look: Callable[[], None]
) -> None:
    inputs, targets = samples
    optimizer = torch.optim.RMSprop(model.parameters(), _LEARNING_RATE)
    batches = ShardedBatches(len(targets), _BATCH_SIZE, 0, 1, 0)
    for epoch in range(epochs):
        batches.set_epoch(epoch)
        for rows in batches:
            cross_entropy(model(inputs[rows]), targets[rows]).backward()
            if epoch == epochs - 1:
                look()
            optimizer.step()
            optimizer.zero_grad()


def text(figures: dict[str, Any]) -> str:
    """Return the tables of errors."""
    known = {tuple(row[key] for key in _KEYS): row["relative"] for row in figures["rows"]}
    parts = {"activations": _LAYERS, "activation_gradients": _LAYERS, "gradients": _PARAMETERS}
    said = (
        f"{_HIDDEN:,} rectifiers, {figures['epochs']} epochs, test accuracy "
        f"{figures['accuracy']:.2%}. Table 2 has three figures for each type, of three layers it "
        "does not name, on MNIST, both of activations and of gradients, and no errors of what "
        "comes back. Of 784x1024x10 only two layers have gradients."
    )
    return "\n\n".join([*(_of(known, what, own) for what, own in parts.items()), said])


def _of(known: dict[tuple[str, str, str, str], float], what: str, parts: Sequence[str]) -> str:
    printed, lines = _PRINTED.get(what), []
    for name in TABLES:
        ours = (
            " / ".join(f"{100 * known[what, part, name, scale]:.3g}" for part in parts)
            for scale in (_BLOCKS, _WHOLE)
        )
        lines.append((name, *([printed[name]] if printed else []), *ours))
    head = ("type", *(["printed (MNIST)"] if printed else []))
    title = f"{what.capitalize()}: mean relative error, %, of {' / '.join(parts)}"
    return table(title, (*head, "in blocks of 1,024", "one scale, as section 3.4"), lines)
