"""The state of modules, optimizers, schedules and random numbers, as tensors and plain values.

What is loaded is checked first, by names, shapes and types: it fits wholly, or InvalidInput says
what does not, and nothing is changed. Tensors that are returned are the live ones: copy them before
training goes on.
"""

import logging
import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.checkpoints.json_values import Json, copied
from paceline.checkpoints.tensor_file import Tensors, check_can_be_saved
from paceline.core.errors import InvalidInput
from paceline.core.reading import first_fault
from paceline.links.devices import device_of

logger = logging.getLogger(__name__)

_MAX_DIFFERENCES = 3  # that an error lists
_EXTRA = "_extra_state"  # of torch's modules that define get_extra_state
_PARAMETER, _HOST = "parameter", "host"  # where a tensor of an optimizer lies
_TORCH, _DEVICE, _PYTHON, _NUMPY = "torch", "device", "python", "numpy"  # random numbers
_TWISTER = "MT19937"
_CONFIG = ConfigDict(extra="forbid")


def module_state(module: nn.Module) -> Tensors:
    """Return the parameters and buffers of a module's state, by their names, shared ones once.

    Raises InvalidInput for state that is none of these, as of `get_extra_state`.
    """
    return {name: value for name, (value, first) in _named_state(module).items() if name == first}


def load_module_state(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load the tensors that `module_state` has returned of such a module.

    Raises InvalidInput with up to three names, shapes or types that differ.
    """
    named = _named_state(module)
    check_fits({name: one for name, (one, first) in named.items() if name == first}, tensors)
    # The module's own dict: it has the versions of its layers, and they may have hooks.
    state = module.state_dict()
    for name, (_, first) in named.items():
        state[name] = tensors[first]
    module.load_state_dict(state)


def check_fits(
    wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], field: str = "model"
) -> None:
    """Raise InvalidInput unless both have tensors of the same names, shapes and types."""
    own, saved = ({name: kind_of(one) for name, one in known.items()} for known in (wanted, found))
    check_same(field, "tensor", own, saved)


def check_same(
    field: str, what: str, wanted: Mapping[str, object], found: Mapping[str, object]
) -> None:
    """Raise InvalidInput that lists up to three names by which a checkpoint differs."""
    lines = [f"{what} {name!r} is not in the checkpoint" for name in wanted.keys() - found.keys()]
    lines += [f"{what} {name!r} is in the checkpoint only" for name in found.keys() - wanted.keys()]
    lines += [
        f"{what} {name!r} is {found[name]} in the checkpoint, and {wanted[name]} here"
        for name in wanted.keys() & found.keys()
        if wanted[name] != found[name]
    ]
    if lines:
        num_more = len(lines) - _MAX_DIFFERENCES
        more = f"; and {num_more} more" if num_more > 0 else ""
        raise InvalidInput(field, "; ".join(sorted(lines)[:_MAX_DIFFERENCES]) + more)


def kind_of(tensor: Tensor) -> str:
    """Return a tensor's shape and type, as in "4x3 float32"."""
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')}"


def _named_state(module: nn.Module) -> dict[str, tuple[Tensor, str]]:
    """Return each tensor of a module's state with the first of its names."""
    named: dict[str, tuple[Tensor, str]] = {}
    first: dict[int, str] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if name.rpartition(".")[2] == _EXTRA:
            raise InvalidInput(
                name,
                "is what a module's get_extra_state returns, and cannot be saved",
                hint="keep it in a buffer",
            )
        if nn.parameter.is_lazy(value):
            raise InvalidInput(name, "has no shape yet", hint="run the model on a batch before")
        check_can_be_saved(name, value)
        named[name] = value.detach(), first.setdefault(id(value), name)
    return named


@dataclass(frozen=True, config=_CONFIG)
class _Values:
    """Plain values by their keys; `tensors`: the place of each tensor by its key.

    Its place is "parameter", the device of the parameter, or "host".
    """

    values: dict[str, Any]
    tensors: dict[str, str]


@dataclass(frozen=True, config=_CONFIG)
class _Group:
    """A parameter group: the names of its parameters, and its options."""

    params: list[str]
    options: _Values


@dataclass(frozen=True, config=_CONFIG)
class _OptimizerValues:
    """An optimizer without its tensors; `parameters` are the shapes and types by name."""

    kind: str
    parameters: dict[str, str]
    groups: list[_Group]
    state: dict[str, _Values]


_OPTIMIZER = TypeAdapter(_OptimizerValues)


def optimizer_state(
    optimizer: Optimizer, names: Iterable[tuple[str, Tensor]]
) -> tuple[Tensors, Json]:
    """Return the state of any optimizer of torch's kind, by the names of its parameters.

    `names` are those of `model.named_parameters()`. A tensor KEY of a parameter's state is called
    `state/NAME/KEY`, one of a parameter group `group/INDEX/KEY`. Raises InvalidInput for LBFGS, and
    for state that is neither tensors nor plain values.
    """
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidInput(
            "optimizer",
            "LBFGS keeps lists of tensors, and cannot be saved",
            hint="take another one",
        )
    named, known = _named_parameters(optimizer, names), optimizer.state_dict()
    tensors: Tensors = {}
    groups = []
    for index, group in enumerate(known["param_groups"]):
        options = {key: value for key, value in group.items() if key != "params"}
        own = [named[number] for number in group["params"]]
        device = own[0][1].device if own else torch.device("cpu")
        parted = _parted(options, f"group/{index}", device, tensors)
        groups.append(_Group([name for name, _ in own], parted))
    state = {}
    for number, values in known["state"].items():
        if not isinstance(number, int):
            raise InvalidInput(
                "optimizer", f"{kind} has state of {number!r}, which is no parameter"
            )
        name, parameter = named[number]
        state[name] = _parted(values, f"state/{name}", parameter.device, tensors)
    parameters = {name: kind_of(parameter) for name, parameter in named}
    return tensors, asdict(_OptimizerValues(kind, parameters, groups, state))


def _parted(
    values: Mapping[str, Any], prefix: str, device: torch.device, tensors: Tensors
) -> _Values:
    """Return the plain ones of these values, and add the others to the tensors."""
    plain, places = {}, {}
    for key, value in values.items():
        if not isinstance(value, Tensor):
            plain[key] = copied(f"the optimizer's {key!r}", value)
            continue
        if (name := f"{prefix}/{key}") in tensors:
            raise InvalidInput("optimizer", f"two tensors of the optimizer would be {name!r}")
        check_can_be_saved(name, value)
        tensors[name] = value.detach()
        places[key] = _PARAMETER if value.device == device else _HOST
    return _Values(plain, places)


def load_optimizer_state(
    optimizer: Optimizer,
    names: Iterable[tuple[str, Tensor]],
    tensors: Mapping[str, Tensor],
    values: Json,
) -> None:
    """Load what `optimizer_state` has returned; the next step is that of the optimizer saved.

    Its options replace this one's, learning rates among them. Raises InvalidInput for another kind
    of optimizer, other parameters or groups of them, other options, or tensors that are missing.
    """
    names = list(names)
    named, now = _named_parameters(optimizer, names), optimizer.state_dict()
    saved = _checked(optimizer_state(optimizer, names)[1], values, tensors)
    groups = []
    for index, (group, one) in enumerate(zip(saved.groups, now["param_groups"], strict=True)):
        own = {
            key: tensors[f"group/{index}/{key}"].to(one[key].device, copy=True)
            for key in group.options.tensors
        }
        groups.append(group.options.values | own | {"params": one["params"]})
    state = {
        number: saved.state[name].values
        | {key: tensors[f"state/{name}/{key}"] for key in saved.state[name].tensors}
        for number, (name, _) in enumerate(named)
        if name in saved.state
    }
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    # torch turns all but "step" into the parameter's type, as NAdam's float32 product into float64,
    # and leaves the file's layout, which fused kernels on cores take for the parameter's.
    for name, parameter in named:
        loaded = optimizer.state[parameter] if name in saved.state else {}
        for key, place in saved.state[name].tensors.items() if loaded else ():
            device = torch.device("cpu") if place == _HOST else loaded[key].device
            loaded[key] = _like(parameter, tensors[f"state/{name}/{key}"], device)


def _checked(now: Json, values: Json, tensors: Mapping[str, Tensor]) -> _OptimizerValues:
    """Return the values of an optimizer that was saved; InvalidInput if they do not fit."""
    own = _OPTIMIZER.validate_python(now)
    try:
        saved = _OPTIMIZER.validate_python(values)
    except ValidationError as error:
        raise InvalidInput("optimizer", first_fault(error)) from None
    if saved.kind != own.kind:
        raise InvalidInput("optimizer", f"the checkpoint's is {saved.kind}, and not {own.kind}")
    check_same("optimizer", "parameter", own.parameters, saved.parameters)
    if [one.params for one in saved.groups] != [one.params for one in own.groups]:
        raise InvalidInput(
            "optimizer",
            f"{own.kind} has other groups of parameters in the checkpoint, or in another order",
        )
    for index, (group, one) in enumerate(zip(own.groups, saved.groups, strict=True)):
        check_same("optimizer", f"option of group {index}", *map(_kinds_of_options, (group, one)))
    check_same(
        "optimizer", "parameter", own.parameters, dict.fromkeys(saved.state, "") | own.parameters
    )
    listed = {
        f"{prefix}/{key}": "there"
        for prefix, one in (
            *((f"group/{index}", group.options) for index, group in enumerate(saved.groups)),
            *((f"state/{name}", one) for name, one in saved.state.items()),
        )
        for key in one.tensors
    }
    check_same("optimizer", "tensor", listed, dict.fromkeys(tensors, "there"))
    return saved


def _kinds_of_options(group: _Group) -> dict[str, str]:
    options = group.options
    return dict.fromkeys(options.values, "a value") | dict.fromkeys(options.tensors, "a tensor")


def _named_parameters(
    optimizer: Optimizer, names: Iterable[tuple[str, Tensor]]
) -> list[tuple[str, Tensor]]:
    """Return the optimizer's parameters with their names, in the order of its own numbers."""
    known = {id(parameter): name for name, parameter in names}
    own = [one for group in optimizer.param_groups for one in group["params"]]
    if any(id(one) not in known for one in own):
        raise InvalidInput(
            "optimizer",
            "the optimizer has a parameter that is none of the model's, and cannot be saved",
        )
    return [(known[id(one)], one) for one in own]


def _like(parameter: Tensor, saved: Tensor, device: torch.device) -> Tensor:
    """Return a copy; of the parameter's shape, it has its layout, as the optimizer had made it."""
    if saved.shape != parameter.shape:
        return saved.to(device, copy=True)
    own = torch.empty_like(parameter.detach(), dtype=saved.dtype, device=device)
    return own.copy_(saved)


def schedule_state(scheduler: LRScheduler) -> Json:
    """Return the state of a schedule: plain values only.

    The functions of a LambdaLR are not in it, as they are code. Raises InvalidInput for what is
    neither, as learning rates that are tensors.
    """
    kind = type(scheduler).__name__
    return {"kind": _kinds(scheduler), "state": copied(kind, scheduler.state_dict())}


def load_schedule_state(scheduler: LRScheduler, state: Json) -> None:
    """Load the state of a schedule of the same kind, whose numbers replace this one's.

    The learning rates are the optimizer's: load its state, too. Raises InvalidInput for a schedule
    of another kind.
    """
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
        raise InvalidInput("schedule", "the saved state is not that of a schedule")
    if state.get("kind") != _kinds(scheduler):
        raise InvalidInput(
            "schedule",
            f"the schedule of the checkpoint is {state.get('kind')}, and not {_kinds(scheduler)}",
        )
    scheduler.load_state_dict(copied("schedule", state["state"]))  # torch takes some out of it


def _kinds(scheduler: LRScheduler) -> str:
    """Return the type of a schedule, with those of the schedules it consists of."""
    parts = ", ".join(map(_kinds, getattr(scheduler, "_schedulers", ())))
    return type(scheduler).__name__ + (f"({parts})" if parts else "")


def random_state(device: torch.device) -> tuple[Tensors, Json]:
    """Return the states of random numbers: torch's, the device's, Python's and numpy's.

    Of numpy the global ones, as of `numpy.random.seed`; generators that a program makes are its
    own. Raises InvalidInput if these are not of numpy's Mersenne Twister.
    """
    version, words, gauss = random.getstate()
    numpy: dict[str, Any] = np.random.get_state(legacy=False)
    if (kind := numpy["bit_generator"]) != _TWISTER:
        raise InvalidInput(
            "numpy", f"numpy's global random numbers are of {kind}, and cannot be saved"
        )
    tensors = {
        _TORCH: torch.get_rng_state(),
        _PYTHON: torch.tensor(words),
        _NUMPY: torch.from_numpy(numpy["state"]["key"].astype(np.int64)),
    }
    if (state := device_of(device).random_state()) is not None:
        tensors[_DEVICE] = state
    values = {
        _PYTHON: {"version": version, "gauss": gauss},
        _NUMPY: {
            "position": numpy["state"]["pos"],
            "has_gauss": numpy["has_gauss"],
            "gauss": numpy["gauss"],
        },
    }
    return tensors, values


def restore_random_state(device: torch.device, tensors: Mapping[str, Tensor], values: Json) -> None:
    """Set the states of random numbers as they were.

    Between devices of different kinds, that of the device cannot be: a warning says so. Raises
    InvalidInput if a state is missing, or is no such state.
    """
    now, _ = random_state(device)
    check_fits(_without_device(now), _without_device(tensors), "random numbers")
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        python, numpy = values[_PYTHON], values[_NUMPY]
        words = tuple(tensors[_PYTHON].tolist())
        random.setstate((python["version"], words, python["gauss"]))
        keys = tensors[_NUMPY].numpy().astype(np.uint32)
        np.random.set_state((_TWISTER, keys, numpy["position"], numpy["has_gauss"], numpy["gauss"]))
        torch.set_rng_state(tensors[_TORCH])
        if _DEVICE in now and _DEVICE in tensors:
            device_of(device).set_random_state(tensors[_DEVICE])
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
        raise InvalidInput(
            "random numbers", f"the saved state is that of no generator: {error}"
        ) from None
    if (_DEVICE in now) != (_DEVICE in tensors):
        logger.warning(
            "random numbers of %s go on elsewhere than in the checkpoint, which was written with "
            "a device of another kind",
            device,
        )


def _without_device(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: one for name, one in tensors.items() if name != _DEVICE}
