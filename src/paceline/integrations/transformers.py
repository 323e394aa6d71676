"""Train with paceline.DataParallel or LocalUpdates in the Transformers Trainer."""

import gc
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from paceline.core.errors import InvalidInput
from paceline.exchange.local_updates import LocalUpdates
from paceline.integrations import accelerate
from paceline.integrations.data_parallel import DataParallel

logger = logging.getLogger(__name__)


def with_paceline(trainer: Trainer, **options: Any) -> Trainer:
    """Make a Trainer wrap its model in paceline.DataParallel; return the trainer.

    `options`: arguments of paceline.DataParallel, in addition to the `ddp_*` fields of
    TrainingArguments. With a single process nothing changes. Raises InvalidInput if the trainer is
    not set up for data parallelism with one process per CPU or GPU.
    """
    if trainer.args.n_gpu > 1:
        raise InvalidInput(
            "trainer",
            f"uses {trainer.args.n_gpu} GPUs in one process",
            hint="start one process per GPU with torchrun",
        )
    accelerate.with_paceline(trainer.accelerator, **options)
    trainer.add_callback(_Check(trainer))
    return trainer


class _Check(TrainerCallback):
    """Raises InvalidInput at the start of training if `with_paceline` has had no effect.

    The model is then not wrapped in paceline.DataParallel. Known causes are SageMaker, a
    model that is sharded while loading, and a hyperparameter search, where each trial creates a new
    accelerator.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        wrapped, alone = self._trainer.model_wrapped, self._trainer.accelerator.num_processes == 1
        if not alone and not isinstance(wrapped, DataParallel):
            raise InvalidInput(
                "trainer",
                f"has wrapped the model in {type(wrapped).__name__} instead of DataParallel",
                hint="with_paceline does not support SageMaker, sharding or hyperparameter search",
            )


class LocalUpdatesCallback(TrainerCallback):
    """Trains with LocalUpdates: `Trainer(..., callbacks=[LocalUpdatesCallback(sync_every=50)])`.

    Accepts the options of LocalUpdates; `num_steps` defaults to the Trainer's number of steps.
    During training, the Trainer's DistributedDataParallel exchanges no gradients. The
    Trainer's option `average_tokens_across_devices` is turned off, because it communicates in every
    step. Each process writes a state file into the Trainer's checkpoints. When training resumes,
    each process reads its state file from `output_dir`, or another's if its own is missing.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._updates: LocalUpdates | None = None
        self._averages_tokens = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Create LocalUpdates; if training resumes, load their state from the checkpoint."""
        if self._updates is not None:  # still open, because an exception ended the last training
            self._updates.__exit__(RuntimeError, None, None)
        options = {"num_steps": state.max_steps} | self._options
        self._updates = LocalUpdates(_wrapped(given["model"]), given["optimizer"], **options)
        if state.global_step:
            self._load(_checkpoint(args, state), args.process_index)
        self._averages_tokens = args.average_tokens_across_devices
        args.average_tokens_across_devices = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Average the remaining changes after the last step, before the Trainer tests and saves."""
        if control.should_training_stop and self._updates is not None:
            self._updates.close()

    on_epoch_end = on_step_end  # early stopping may end training after `on_step_end`

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Write this process's LocalUpdates state into the Trainer's checkpoint folder."""
        if self._updates is not None:
            folder = _checkpoint(args, state)
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(self._updates.state_dict(), folder / _file(args.process_index))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """End LocalUpdates, and restore the option `average_tokens_across_devices`."""
        if self._updates is not None:
            self._updates.close()
            args.average_tokens_across_devices = self._averages_tokens
        self._updates = None

    def _load(self, folder: Path, process: int) -> None:
        own = folder / _file(process)
        files = [own] if own.exists() else sorted(folder.glob(_file("*")))
        if not files:
            logger.warning("%s has no state of local updates: outer momentum starts at 0", folder)
            return
        assert self._updates is not None
        self._updates.load_state_dict(torch.load(files[0], weights_only=True))


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"


def _file(process: int | str) -> str:
    return f"local_updates_{process}.pt"


def _wrapped(model: nn.Module) -> nn.Module:
    """Return a ModuleList of the DDP modules around `model`, or the model if there are none.

    All Python objects are searched, because callbacks receive only the model without its wrappers.
    """
    found = [
        one
        for one in gc.get_objects()
        if issubclass(type(one), DistributedDataParallel) and model in one.modules()
    ]
    return nn.ModuleList(found) if found else model
