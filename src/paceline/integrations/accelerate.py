"""Make Accelerate wrap models in paceline.DataParallel."""

import os
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.core.errors import InvalidInput
from paceline.integrations.data_parallel import DataParallel, check_hook

_PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
# Check environment variables for these, because on CPUs `distributed_type` does not report them.
_OTHERS = ("DEEPSPEED", "FSDP", "MEGATRON_LM")
_MARK = "_is_accelerate_prepared"  # attribute that Accelerate sets on prepared objects


def with_paceline(accelerator: Accelerator, **options: Any) -> Accelerator:
    """Make `accelerator.prepare` wrap models in paceline.DataParallel; return the accelerator.

    `options`: arguments of paceline.DataParallel, in addition to the accelerator's
    DistributedDataParallelKwargs. A model that is already a paceline.DataParallel is not wrapped
    again. With a single process nothing changes. Raises InvalidInput if the accelerator uses
    another kind of parallelism, or if an option is also set in DistributedDataParallelKwargs.
    """
    _check(accelerator)
    handler = accelerator.ddp_handler
    if handler is not None:
        for name in handler.to_kwargs().keys() & options.keys():
            raise InvalidInput(name, "is also set in DistributedDataParallelKwargs")
        if handler.comm_hook != DDPCommunicationHookType.NO:
            check_hook("comm_hook", options.get("exchange", "auto"))
    if accelerator.num_processes > 1:
        accelerator.prepare_model = _Preparation(accelerator, options).prepare
    return accelerator


class _Preparation:
    """Replaces `Accelerator.prepare_model`, to wrap models in paceline.DataParallel."""

    def __init__(self, accelerator: Accelerator, options: dict[str, Any]) -> None:
        self._accelerator, self._options = accelerator, options
        self._prepare: Callable[..., nn.Module] = accelerator.prepare_model
        # the wrappers, by id(unwrapped model)
        self._made: WeakValueDictionary[int, DataParallel] = WeakValueDictionary()

    def prepare(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model as Accelerate does; wrap it if it is unwrapped and will be trained."""
        wrapped = self._made.get(id(model), model)
        if isinstance(wrapped, DataParallel) and not evaluation_mode:
            return self._prepare(wrapped, device_placement=False, evaluation_mode=True)
        if type(model) is DistributedDataParallel:
            raise InvalidInput(
                "model", "is wrapped in DistributedDataParallel", hint="pass the unwrapped model"
            )
        prepared = self._prepare(model, device_placement, evaluation_mode=True)
        if evaluation_mode or not any(one.requires_grad for one in model.parameters()):
            return prepared
        accelerator, handler = self._accelerator, self._accelerator.ddp_handler
        options = {**(handler.to_kwargs() if handler else {}), **self._options}
        if accelerator.device.type != "cpu":
            options["device_ids"] = [accelerator.local_process_index]
        wrapped = DataParallel(prepared, **options)
        if handler is not None:
            handler.register_comm_hook(wrapped)
        # Accelerate has registered the unwrapped model; let it save and load the wrapper instead.
        vars(prepared)[_MARK], vars(wrapped)[_MARK] = False, True
        others = [one for one in accelerator._models if one is not prepared]
        accelerator._models = [*others, wrapped]
        self._made[id(model)] = wrapped
        return wrapped


def _check(accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type
    more = [] if kind in _PLAIN else [kind.value]
    more += [one for one in _OTHERS if os.environ.get(f"ACCELERATE_USE_{one}") == "true"]
    if accelerator.parallelism_config is not None:
        more.append("parallelism_config")
    if more:
        raise InvalidInput(
            "accelerator", f"uses {more[0]}; only data parallelism on CPUs or GPUs is supported"
        )
    if accelerator.mixed_precision == "fp8":
        raise InvalidInput("mixed_precision", "must be 'bf16', 'fp16' or 'no'", got="fp8")
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes < launched:
        raise InvalidInput(
            "accelerator",
            f"uses only {accelerator.num_processes} of the {launched} started processes",
            hint="on CPUs use Accelerator(cpu=True) or TrainingArguments(use_cpu=True)",
        )
