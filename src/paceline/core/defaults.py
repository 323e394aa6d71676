"""Default data, optimizer and schedule of a training, by model."""

from dataclasses import dataclass
from typing import Any

from paceline.core.settings import TrainSettings

_SCHEDULE = "constant"
_SGD, _SGD_RATE, _SGD_MOMENTUM = "sgd", 0.05, 0.9


@dataclass(frozen=True, slots=True)
class Usual:
    """A model's default data, optimizer and learning rate."""

    data: str = "digits"
    optimizer: str = _SGD
    learning_rate: float = _SGD_RATE


# Defaults by the prefix of a built-in model's name. The first match counts; models without a match
# use `Usual()`.
_BY_PREFIX = (
    ("alexnet", Usual(learning_rate=0.001)),  # diverges at 0.05
    # Brown et al. 2020, table 2.1, for the smallest model.
    ("gpt2", Usual("text", "adamw", 6e-4)),
    ("gpt", Usual("text", "adamw", 1e-3)),
    ("vit", Usual("digits", "adamw", 1e-3)),
)


def usual_for(model: str) -> Usual:
    """Return the defaults of a model.

    A user's package.module:factory gets the defaults of an image classifier.
    """
    known = () if ":" in model else _BY_PREFIX
    return next((usual for name, usual in known if model.startswith(name)), Usual())


def completed(settings: TrainSettings) -> TrainSettings:
    """Fill in the default data, optimizer, rate, momentum and schedule.

    Only None is replaced. With an optimizer other than the model's default, rate and momentum stay
    None, which selects that optimizer's own defaults.
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
