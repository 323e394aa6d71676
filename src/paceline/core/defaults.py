"""Default data, optimizer and schedule of a training, by model."""

from typing import NamedTuple

from paceline.core.settings import TrainSettings

_SGD, _SGD_RATE = "sgd", 0.05


class Usual(NamedTuple):
    """A model's default data, optimizer and learning rate."""

    data: str = "digits"
    optimizer: str = _SGD
    learning_rate: float = _SGD_RATE


# Defaults by the prefix of a built-in model's name; the first match counts.
_BY_PREFIX = {
    "alexnet": Usual(learning_rate=0.001),  # diverges at the usual 0.05
    "gpt2": Usual("text", "adamw", 6e-4),  # Brown et al. 2020, table 2.1, for the smallest model
    "gpt": Usual("text", "adamw", 1e-3),
    "vit": Usual("digits", "adamw", 1e-3),
}


def usual_for(model: str) -> Usual:
    """Return the defaults of a model; for a user's model, the defaults of image classifiers."""
    for name, usual in _BY_PREFIX.items():
        if model.startswith(name) and ":" not in model:
            return usual
    return Usual()


def completed(settings: TrainSettings) -> TrainSettings:
    """Replace None in data, optimizer, learning rate, momentum and schedule by model defaults.

    If the optimizer is neither the model's default nor SGD, the learning rate and momentum stay
    None, which selects the optimizer's own defaults.
    """
    usual = usual_for(settings.model)
    optimizer = settings.optimizer or usual.optimizer
    is_sgd = optimizer.lower() == _SGD
    rate = _SGD_RATE if is_sgd else None
    known = {
        "data": usual.data,
        "optimizer": optimizer,
        "learning_rate": usual.learning_rate if optimizer.lower() == usual.optimizer else rate,
        "momentum": 0.9 if is_sgd else None,
        "schedule": "constant",
    }
    missing = {name: value for name, value in known.items() if getattr(settings, name) is None}
    return settings.model_copy(update=missing)
