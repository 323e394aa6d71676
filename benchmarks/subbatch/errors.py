"""Measure the errors of gradients in the four 8-bit types (Dettmers 2016, table 2, MNIST).

The network of section 3.4 (1,024 hidden ReLU units, dropout of 0.2, 0.3 and 0.3, RMSProp at 0.003)
learns the digits in float32. In the last epoch, copies of all gradients that data-parallel workers
would exchange are encoded and decoded; training continues with the originals.
"""

from collections import OrderedDict
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from figures import table
from paceline.codecs.blockwise import EightBit
from paceline.codecs.quantization import TABLES
from paceline.training.data import ShardedBatches, load

_EPOCHS, _BATCH_SIZE, _LEARNING_RATE, _HIDDEN = 30, 64, 0.003, 1024
# Table 2, "MNIST data parallel": relative errors of three layers in %.
_PRINTED = {
    "dynamic8": "3 / 4 / 5",
    "linear8": "5 / 6 / 6",
    "mantissa8": "4.5 / 4.5 / 6",
    "static8": "4 / 4 / 5",
}


def measure(quick: bool) -> dict[str, Any]:
    """Return the test accuracy, and mean relative errors of nonzero gradients."""
    epochs = 1 if quick else _EPOCHS
    torch.manual_seed(0)
    digits = load("digits")
    # In 784x1024x10, only the scores are left for the third dropout share.
    layers = {
        "flat": nn.Flatten(),
        "dropped_inputs": nn.Dropout(0.2),
        "first": nn.Linear(64, _HIDDEN),
        "rectified": nn.ReLU(),
        "dropped_hidden": nn.Dropout(0.3),
        "last": nn.Linear(_HIDDEN, 10),
        "dropped_scores": nn.Dropout(0.3),
    }
    model = nn.Sequential(OrderedDict(layers))
    inputs, targets = digits.train[:]
    optimizer = torch.optim.RMSprop(model.parameters(), _LEARNING_RATE)
    batches = ShardedBatches(len(targets), _BATCH_SIZE, 0, 1, 0)
    errors: dict[str, dict[str, list[Tensor]]] = {
        name: {codec: [] for codec in TABLES} for name, _ in model.named_parameters()
    }
    for epoch in range(epochs):
        batches.set_epoch(epoch)
        for rows in batches:
            cross_entropy(model(inputs[rows]), targets[rows]).backward()
            if epoch == epochs - 1:
                for (name, parameter), codec in product(model.named_parameters(), TABLES):
                    errors[name][codec].append(_relative(codec, parameter.grad))
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    images, labels = digits.test[:]
    with torch.no_grad():
        accuracy = float((model(images).argmax(1) == labels).double().mean())
    means = {
        name: {codec: float(torch.cat(own).mean()) for codec, own in of_types.items()}
        for name, of_types in errors.items()
    }
    return {"epochs": epochs, "accuracy": accuracy, "errors": means}


def _relative(codec: str, values: Tensor) -> Tensor:
    """Return the relative errors of the values that are not zero."""
    coding, flat = EightBit(codec), values.flatten()
    coded = coding.decode(coding.encode(flat)).double()
    return (coded[flat != 0] / flat[flat != 0].double() - 1).abs()


def text(figures: dict[str, Any]) -> str:
    """Return the table of errors."""
    errors = figures["errors"]
    lines = [
        (name, _PRINTED[name], " / ".join(f"{100 * own[name]:.3g}" for own in errors.values()))
        for name in TABLES
    ]
    title = f"Gradients: mean relative error, %, of {' / '.join(errors)}"
    said = (
        f"{_HIDDEN:,} rectifiers, {figures['epochs']} epochs, test accuracy "
        f"{figures['accuracy']:.2%}. Table 2 has three figures for each type, of three layers it "
        "does not name, on MNIST. Of 784x1024x10 only two layers have gradients."
    )
    return f"{table(title, ('type', 'printed (MNIST)', 'in blocks of 1,024'), lines)}\n\n{said}"
