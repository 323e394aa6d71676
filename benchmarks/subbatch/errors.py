"""Measure the errors of the four 8-bit types (Dettmers 2016, table 2, MNIST).

The network of section 3.4 (1,024 hidden ReLU units, dropout of 0.2, 0.3 and 0.3, RMSProp at 0.003)
learns the digits in float32. In the last epoch, copies of all tensors that model-parallel layers or
data-parallel workers would exchange are encoded and decoded; training continues with the originals.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from figures import table
from paceline.codecs.blockwise import EightBit
from paceline.codecs.quantization import TABLES
from paceline.training.data import ShardedBatches, load

_EPOCHS, _BATCH_SIZE, _LEARNING_RATE = 30, 64, 0.003
_HIDDEN, _NUM_CLASSES, _DROPOUT = 1024, 10, (0.2, 0.3, 0.3)
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
_Means = dict[str, dict[str, dict[str, float]]]  # by purpose, layer or parameter, and type


class _Network(nn.Module):
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
    """Return the test accuracy, and mean relative errors of nonzero values."""
    epochs = 1 if quick else _EPOCHS
    torch.manual_seed(0)
    digits, model = load("digits"), _Network()
    inputs, targets = digits.train[:]
    optimizer = torch.optim.RMSprop(model.parameters(), _LEARNING_RATE)
    batches = ShardedBatches(len(targets), _BATCH_SIZE, 0, 1, 0)
    errors: dict[tuple[str, str, str], list[Tensor]] = defaultdict(list)
    for epoch in range(epochs):
        batches.set_epoch(epoch)
        for rows in batches:
            cross_entropy(model(inputs[rows]), targets[rows]).backward()
            if epoch == epochs - 1:
                for key, relative in _errors(model):
                    errors[key].append(relative)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    images, labels = digits.test[:]
    with torch.no_grad():
        accuracy = float((model(images).argmax(1) == labels).double().mean())
    found: _Means = defaultdict(lambda: defaultdict(dict))
    for (what, part, name), own in errors.items():
        found[what][part][name] = float(torch.cat(own).mean())
    return {"epochs": epochs, "accuracy": accuracy, "errors": found}


def _errors(model: _Network) -> Iterator[tuple[tuple[str, str, str], Tensor]]:
    """Yield (purpose, layer or parameter, type) and errors of all tensors to exchange."""
    for what, part, values in _travelling(model):
        flat = values.flatten()
        for name in TABLES:
            codec, nonzero = EightBit(name), flat != 0
            coded = codec.decode(codec.encode(flat))[nonzero].double()
            yield (what, part, name), (coded / flat[nonzero].double() - 1).abs()


def _travelling(model: _Network) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (purpose, layer or parameter, values) of all tensors that workers would exchange."""
    for layer, values in model.seen.items():
        yield "activations", layer, values.detach()
        yield "activation_gradients", layer, values.grad
    for name, parameter in model.named_parameters():
        yield "gradients", name, parameter.grad


def text(figures: dict[str, Any]) -> str:
    """Return the tables of errors."""
    said = (
        f"{_HIDDEN:,} rectifiers, {figures['epochs']} epochs, test accuracy "
        f"{figures['accuracy']:.2%}. Table 2 has three figures for each type, of three layers it "
        "does not name, on MNIST, both of activations and of gradients, and no errors of what "
        "comes back. Of 784x1024x10 only two layers have gradients."
    )
    return "\n\n".join([*(_of(what, own) for what, own in figures["errors"].items()), said])


def _of(what: str, errors: dict[str, dict[str, float]]) -> str:
    """Return the table of a purpose."""
    printed = _PRINTED.get(what, {})
    lines = [
        (
            name,
            printed.get(name, "-"),
            " / ".join(f"{100 * errors[part][name]:.3g}" for part in errors),
        )
        for name in TABLES
    ]
    title = f"{what.capitalize()}: mean relative error, %, of {' / '.join(errors)}"
    return table(title, ("type", "printed (MNIST)", "in blocks of 1,024"), lines)
