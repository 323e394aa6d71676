"""Return and load the state of modules, optimizers, schedulers and random number generators.

A state consists of named tensors and plain values. The returned tensors share memory with the
model and optimizer, so copy them before training continues. Before a `load_*` function changes
anything, it compares names, shapes and types; InvalidInput lists the differences.
"""

import logging
import random
from collections.abc import Iterable, Mapping, Sequence
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
from paceline.checkpoints.tensor_file import Tensors, check_can_be_saved, within
from paceline.core.errors import InvalidInput
from paceline.core.reading import first_fault
from paceline.links.devices import Device, device_of

logger = logging.getLogger(__name__)

_MAX_DIFFERENCES = 3  # maximum number of differences listed in one error
# Where an optimizer's tensor is stored: on its parameter's device, or in host memory.
_PARAMETER, _HOST = "parameter", "host"
_TWISTER = "MT19937"
_CONFIG = ConfigDict(extra="forbid")


def module_state(module: nn.Module) -> Tensors:
    """Return a module's parameters and buffers by name; a shared tensor has one entry.

    Raises InvalidInput if the module has other state, for example from `get_extra_state`.
    """
    return {name: value for name, (value, first) in _named_state(module).items() if name == first}


def load_module_state(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load the tensors that `module_state` returned; names, shapes and types must be equal."""
    named = _named_state(module)
    check_fits({name: one for name, (one, first) in named.items() if name == first}, tensors)
    # Do not create a new dict. The dict that state_dict() returns also has the layers' versions,
    # which load_state_dict and the layers' hooks may read.
    state = module.state_dict()
    for name, (_, first) in named.items():
        state[name] = tensors[first]
    module.load_state_dict(state)


def check_fits(
    wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], field: str = "model"
) -> None:
    """Raise InvalidInput unless `wanted` and `found` have the same names, shapes and types."""
    own, saved = ({name: kind_of(one) for name, one in known.items()} for known in (wanted, found))
    check_same(field, "tensor", own, saved)


def check_same(
    field: str, what: str, wanted: Mapping[str, object], found: Mapping[str, object]
) -> None:
    """Raise InvalidInput if items of this run (`wanted`) and of the checkpoint (`found`) differ.

    For the error, `field` is its subject, such as "model"; `what` is a word for the items, such as
    "tensor".
    """
    lines = [f"{what} {name!r} is not in the checkpoint" for name in wanted.keys() - found.keys()]
    lines += [f"{what} {name!r} is in the checkpoint only" for name in found.keys() - wanted.keys()]
    lines += [
        f"{what} {name!r} is {found[name]} in the checkpoint, but {wanted[name]} in this run"
        for name in wanted.keys() & found.keys()
        if wanted[name] != found[name]
    ]
    if lines:
        num_more = len(lines) - _MAX_DIFFERENCES
        more = f"; and {num_more} more" if num_more > 0 else ""
        raise InvalidInput(field, "; ".join(sorted(lines)[:_MAX_DIFFERENCES]) + more)


def kind_of(tensor: Tensor) -> str:
    """Return a tensor's shape and type as text, such as "4x3 float32"."""
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')}"


def _named_state(module: nn.Module) -> dict[str, tuple[Tensor, str]]:
    """Map each name in a module's state to its tensor, and to the first name of this tensor.

    A tensor that several layers share has several names.
    """
    named: dict[str, tuple[Tensor, str]] = {}
    first: dict[int, str] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if name.rpartition(".")[2] == "_extra_state":
            problem = "comes from get_extra_state, and cannot be saved"
            raise InvalidInput(name, problem, hint="keep it in a buffer")
        if nn.parameter.is_lazy(value):
            problem = "is a lazy parameter or buffer without a shape"
            raise InvalidInput(name, problem, hint="run the model on a batch first")
        check_can_be_saved(name, value)
        named[name] = value.detach(), first.setdefault(id(value), name)
    return named


@dataclass(frozen=True, config=_CONFIG)
class _Values:
    """A dict's plain values, and where each of its tensors is stored: _PARAMETER or _HOST."""

    values: dict[str, Any]
    tensors: dict[str, str]


@dataclass(frozen=True, config=_CONFIG)
class _Group:
    """The names of the parameters in a parameter group, and the group's options."""

    params: list[str]
    options: _Values


@dataclass(frozen=True, config=_CONFIG)
class _OptimizerValues:
    """The type, parameter groups and plain state of an optimizer.

    `parameters`: shape and type of each parameter, as text.
    """

    kind: str
    parameters: dict[str, str]
    groups: list[_Group]
    state: dict[str, _Values]


def optimizer_state(
    optimizer: Optimizer, names: Iterable[tuple[str, Tensor]]
) -> tuple[Tensors, Json]:
    """Return an optimizer's state as tensors and plain values.

    `names`: `model.named_parameters()`. Entry KEY in the state of parameter NAME becomes tensor
    `state/NAME/KEY`. If option KEY of a parameter group is a tensor, it becomes
    `group/INDEX/KEY`. Raises InvalidInput for LBFGS, and for state other than tensors and plain
    values.
    """
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        problem = "cannot be LBFGS, whose lists of tensors cannot be saved"
        raise InvalidInput("optimizer", problem, hint="use another optimizer")
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
            problem = f"has state for {number!r}, which is not a parameter"
            raise InvalidInput("optimizer", problem, got=kind)
        name, parameter = named[number]
        state[name] = _parted(values, f"state/{name}", parameter.device, tensors)
    parameters = {name: kind_of(parameter) for name, parameter in named}
    return tensors, asdict(_OptimizerValues(kind, parameters, groups, state))


def _parted(
    values: Mapping[str, Any], prefix: str, device: torch.device, tensors: Tensors
) -> _Values:
    """Return a dict's plain values and its tensors' places; add the tensors to `tensors`.

    A tensor gets the name PREFIX/KEY. Its place is _PARAMETER if it is on `device`, the device of
    the parameter; otherwise _HOST.
    """
    plain, places = {}, {}
    for key, value in values.items():
        if not isinstance(value, Tensor):
            plain[key] = copied(f"optimizer.{key}", value)
            continue
        if (name := f"{prefix}/{key}") in tensors:
            raise InvalidInput("optimizer", f"has two tensors named {name!r}")
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
    """Load the state that `optimizer_state` returned, including options such as learning rates.

    Raises InvalidInput if tensors are missing, or if the optimizer's type, parameters, groups or
    options differ from the saved ones.
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
    # Copy the saved tensors again, because load_state_dict converts every tensor except "step" to
    # the parameter's type, for example NAdam's float32 `mu_product` to float64. load_state_dict
    # also keeps the saved tensors' strides, but fused CPU kernels need the parameter's strides.
    for name, parameter in named:
        loaded = optimizer.state[parameter] if name in saved.state else {}
        for key, place in saved.state[name].tensors.items() if loaded else ():
            device = torch.device("cpu") if place == _HOST else loaded[key].device
            loaded[key] = _like(parameter, tensors[f"state/{name}/{key}"], device)


def _checked(now: Json, values: Json, tensors: Mapping[str, Tensor]) -> _OptimizerValues:
    """Parse the saved `values`; raise InvalidInput unless they fit the optimizer.

    `now`: the current values of the optimizer. `tensors`: the saved tensors.
    """
    parse = TypeAdapter(_OptimizerValues).validate_python
    own = parse(now)
    try:
        saved = parse(values)
    except ValidationError as error:
        problem = f"has an invalid state in the checkpoint: {first_fault(error)}"
        raise InvalidInput("optimizer", problem) from None
    if saved.kind != own.kind:
        problem = f"is {own.kind} in this run, but {saved.kind} in the checkpoint"
        raise InvalidInput("optimizer", problem)
    check_same("optimizer", "parameter", own.parameters, saved.parameters)
    if [one.params for one in saved.groups] != [one.params for one in own.groups]:
        problem = "has parameter groups that differ from those in the checkpoint"
        raise InvalidInput("optimizer", problem)
    parts = {f"state/{name}": one for name, one in saved.state.items()}
    for index, (group, one) in enumerate(zip(own.groups, saved.groups, strict=True)):
        kinds = (
            dict.fromkeys(options.values, "a value") | dict.fromkeys(options.tensors, "a tensor")
            for options in (group.options, one.options)
        )
        check_same("optimizer", f"option of group {index}", *kinds)
        parts[f"group/{index}"] = one.options
    known = dict.fromkeys(saved.state, "") | own.parameters
    check_same("optimizer", "parameter", own.parameters, known)
    expected = {f"{part}/{key}": "there" for part, one in parts.items() for key in one.tensors}
    check_same("optimizer", "tensor", expected, dict.fromkeys(tensors, "there"))
    return saved


def _named_parameters(
    optimizer: Optimizer, names: Iterable[tuple[str, Tensor]]
) -> list[tuple[str, Tensor]]:
    """Return the optimizer's parameters with their names, in the optimizer's order."""
    known = {id(parameter): name for name, parameter in names}
    own = [one for group in optimizer.param_groups for one in group["params"]]
    if any(id(one) not in known for one in own):
        raise InvalidInput("optimizer", "has a parameter that is not in the model")
    return [(known[id(one)], one) for one in own]


def _like(parameter: Tensor, saved: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device, with the parameter's strides if it has the parameter's shape."""
    if saved.shape != parameter.shape:
        return saved.to(device, copy=True)
    own = torch.empty_like(parameter.detach(), dtype=saved.dtype, device=device)
    return own.copy_(saved)


def schedule_state(scheduler: LRScheduler) -> Json:
    """Return the state of a learning rate scheduler, without the functions of a LambdaLR.

    Raises InvalidInput if a value is not plain, for example if a learning rate is a tensor.
    """
    kind = type(scheduler).__name__
    return {"kind": _kinds(scheduler), "state": copied(kind, scheduler.state_dict())}


def load_schedule_state(scheduler: LRScheduler, state: Json) -> None:
    """Load a scheduler's state; InvalidInput if the checkpoint has another type of scheduler.

    The learning rates are not set; they are part of the optimizer's state.
    """
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
        raise InvalidInput("schedule", "has no valid state in the checkpoint")
    own, saved = _kinds(scheduler), state.get("kind")
    if saved != own:
        raise InvalidInput("schedule", f"is {own} in this run, but {saved} in the checkpoint")
    # Copy, because torch removes entries from the loaded dict.
    scheduler.load_state_dict(copied("schedule", state["state"]))


def _kinds(scheduler: LRScheduler) -> str:
    """Return a scheduler's type, followed by the types of the schedulers that it combines."""
    parts = ", ".join(map(_kinds, getattr(scheduler, "_schedulers", ())))
    return type(scheduler).__name__ + (f"({parts})" if parts else "")


def random_state(device: torch.device) -> tuple[Tensors, Json]:
    """Return the states of the random number generators of torch, the device, Python and numpy."""
    version, words, gauss = random.getstate()
    numpy: dict[str, Any] = np.random.get_state(legacy=False)
    if (kind := numpy["bit_generator"]) != _TWISTER:
        raise InvalidInput("numpy", f"must use {_TWISTER} as the global generator", got=kind)
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words),
        "numpy": torch.from_numpy(numpy["state"]["key"].astype(np.int64)),
    }
    if (state := device_of(device).random_state()) is not None:
        tensors["device"] = state
    of_numpy = {key: numpy[key] for key in ("has_gauss", "gauss")}
    values = {
        "python": {"version": version, "gauss": gauss},
        "numpy": {"position": numpy["state"]["pos"], **of_numpy},
    }
    return tensors, values


def restore_random_state(device: torch.device, tensors: Mapping[str, Tensor], values: Json) -> None:
    """Restore the states that `random_state` returned.

    If the states were saved on another kind of device, logs a warning, and leaves the generator of
    `device` unchanged. Raises InvalidInput if a state is missing or invalid.
    """
    now, _ = random_state(device)
    own, saved = ({key: one[key] for key in one if key != "device"} for one in (now, tensors))
    check_fits(own, saved, "random")
    try:
        python, numpy = values["python"], values["numpy"]
        words = tuple(tensors["python"].tolist())
        random.setstate((python["version"], words, python["gauss"]))
        keys = tensors["numpy"].numpy().astype(np.uint32)
        np.random.set_state((_TWISTER, keys, numpy["position"], numpy["has_gauss"], numpy["gauss"]))
        torch.set_rng_state(tensors["torch"])
        if "device" in now and "device" in tensors:
            device_of(device).set_random_state(tensors["device"])
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InvalidInput("random", f"has an invalid state in the checkpoint: {error}") from None
    if ("device" in now) != ("device" in tensors):
        why = "the checkpoint was written on another kind of device"
        logger.warning("random numbers on %s differ from those of the saved run: %s", device, why)


def worker_state(optimizers: Sequence[Optimizer], device: Device) -> tuple[Tensors, Json]:
    """Return the state of a worker's optimizers (one per thread) and random number generators."""
    found, random_values = random_state(device.torch_device)
    tensors = {f"random/{key}": one for key, one in found.items()}
    values = []
    for number, optimizer in enumerate(optimizers):
        own, plain = optimizer_state(optimizer, _numbered(optimizer))
        tensors |= {f"{number}/{key}": one for key, one in own.items()}
        values.append(plain)
    tensors = {name: one.detach().cpu() for name, one in tensors.items()}
    return tensors, {"optimizers": values, "random": random_values}


def load_worker_state(
    optimizers: Sequence[Optimizer], device: Device, tensors: Tensors, values: Json
) -> None:
    """Load a state that `worker_state` returned; InvalidInput if the optimizers differ."""
    for number, (optimizer, plain) in enumerate(zip(optimizers, values["optimizers"], strict=True)):
        own = within(tensors, f"{number}/")
        load_optimizer_state(optimizer, _numbered(optimizer), own, plain)
    restore_random_state(device.torch_device, within(tensors, "random/"), values["random"])


def _numbered(optimizer: object) -> list[tuple[str, Tensor]]:
    """Return an optimizer's parameters, with their indices as names ("0", "1", ...)."""
    if not isinstance(optimizer, Optimizer):
        problem = "must be a torch.optim.Optimizer to be saved"
        raise InvalidInput("optimizer", problem, got=type(optimizer).__name__)
    own = (one for group in optimizer.param_groups for one in group["params"])
    return [(str(number), one) for number, one in enumerate(own)]
