"""The data, optimizer and schedule of a training for which nobody names them, by its model."""

from dataclasses import dataclass
from typing import Any

from paceline.core.settings import TrainSettings

_SCHEDULE = "constant"
_SGD, _SGD_RATE, _SGD_MOMENTUM = "sgd", 0.05, 0.9


@dataclass(frozen=True, slots=True)
class Usual:
    """What a model is usually trained on, and with which optimizer and rate."""

    data: str = "digits"
    optimizer: str = _SGD
    learning_rate: float = _SGD_RATE


# The first row with which a built-in name begins; others have `Usual()`.
_BY_PREFIX = (
    ("alexnet", Usual(learning_rate=0.001)),  # from its initial weights it runs away at 0.05
    # Brown et al. 2020, table 2.1: for the model of GPT-2's smallest size.
    ("gpt2", Usual("text", "adamw", 6e-4)),
    ("gpt", Usual("text", "adamw", 1e-3)),
    ("vit", Usual("digits", "adamw", 1e-3)),
)


def usual_for(model: str) -> Usual:
    """Return what a model of that name is usually trained with.

    A model of the user's, package.module:factory, is trained like an image classifier.
    """
    known = () if ":" in model else _BY_PREFIX
    return next((usual for name, usual in known if model.startswith(name)), Usual())


def completed(settings: TrainSettings) -> TrainSettings:
    """Return the settings with the usual data, optimizer, rate, momentum and schedule.

    Only what is None is replaced. A rate and a momentum belong to an optimizer: where another than
    the model's usual one is given, they stay None, which stands for that optimizer's own.
    """
    usual = usual_for(settings.model)
    optimizer = settings.optimizer or usual.optimizer
    is_sgd = optimizer.lower() == _SGD
    rate = _SGD_RATE if is_sgd else None
    known: dict[str, Any] = {
        "data": usual.data,
        "optimizer": optimizer,
        "learning_rate": usual.learning_rate if optimizer.lower() == usual.optimizer else rate,
        "momentum": _SGD_MOMENTUM if is_sgd else None,
        "schedule": _SCHEDULE,
    }
    missing = {name: value for name, value in known.items() if getattr(settings, name) is None}
    return settings.model_copy(update=missing)
