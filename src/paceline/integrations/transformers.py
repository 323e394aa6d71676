"""Training with paceline.DataParallel in the Trainer of Transformers."""

from typing import Any

from transformers import Trainer, TrainerCallback

from paceline.core.errors import InvalidInput
from paceline.integrations import accelerate
from paceline.integrations.data_parallel import DataParallel


def with_paceline(trainer: Trainer, **options: Any) -> Trainer:
    """Make a Trainer use DataParallel, with these options of it.

    What TrainingArguments say of DistributedDataParallel goes to DataParallel, too. One process
    alone has nothing to exchange, and nothing changes. Returns the trainer. Raises InvalidInput if
    it is for something else than data parallelism on CPUs or GPUs, one process each.
    """
    if trainer.args.n_gpu > 1:
        raise InvalidInput(
            "trainer",
            f"one process has {trainer.args.n_gpu} GPUs",
            hint="start one for each, with torchrun",
        )
    accelerate.with_paceline(trainer.accelerator, **options)
    trainer.add_callback(_Check(trainer))
    return trainer


class _Check(TrainerCallback):
    """Raises InvalidInput where a Trainer has the model wrapped otherwise than by its accelerator.

    It does so for models that are sharded as they are loaded, on SageMaker, and in trials of a
    search, for each of which it makes another accelerator.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        wrapped, alone = self._trainer.model_wrapped, self._trainer.accelerator.num_processes == 1
        if not alone and not isinstance(wrapped, DataParallel):
            raise InvalidInput(
                "trainer",
                f"has made a {type(wrapped).__name__} of the model without asking the accelerator "
                "that it had at first",
                hint="with_paceline cannot take part in that",
            )
