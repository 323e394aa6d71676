"""What a snapshot keeps of a model and its optimizer: tensors by name, and the numbers beside them.

model/NAME            parameters and buffers
state/NAME/KEY        the optimizer's tensors of a parameter
group/INDEX/KEY       tensors of a parameter group, such as a learning rate
random/cpu, /cuda     the states of the random number generators
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import InvalidInput
from paceline.strategies.wheel.manifest import OptimizerScalars

Tensors = dict[str, Tensor]


def model_tensors(model: nn.Module) -> Tensors:
    """Return the parameters and buffers that a model's state has, shared ones once."""
    tensors: Tensors = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise InvalidInput(f"{name!r} of the model's state is no tensor, and cannot be saved")
        if id(value) not in seen:
            seen.add(id(value))
            tensors[f"model/{name}"] = value.detach()
    return tensors


def random_tensors(device: torch.device) -> Tensors:
    """Return the states of the generators that a model on this device draws from."""
    states = {"random/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["random/cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random(tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Let the generators go on where they were."""
    torch.set_rng_state(tensors["random/cpu"])
    if device.type == "cuda" and "random/cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random/cuda"], device)


def optimizer_parts(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> tuple[OptimizerScalars, Tensors]:
    """Return the optimizer's numbers and its tensors; InvalidInput if it keeps anything else."""
    names = _names_in(optimizer, model)
    known = optimizer.state_dict()
    flat_names = [name for group in names for name in group]
    groups: list[dict[str, Any]] = []
    tensors: Tensors = {}
    for index, (group, own) in enumerate(zip(known["param_groups"], names, strict=True)):
        values = {key: value for key, value in group.items() if key != "params"}
        scalars, found = _apart(values, f"group/{index}")
        groups.append({"params": own, **scalars})
        tensors |= found
    state = {}
    for number, values in known["state"].items():
        state[flat_names[number]], found = _apart(values, f"state/{flat_names[number]}")
        tensors |= found
    return OptimizerScalars(type(optimizer).__name__, groups, state), tensors


def optimizer_state(
    kept: OptimizerScalars,
    tensors: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
) -> dict[str, Any]:
    """Return what `optimizer.load_state_dict` takes; InvalidInput says what does not fit."""
    kind, names = type(optimizer).__name__, _names_in(optimizer, model)
    if kept.kind != kind:
        raise InvalidInput(f"its optimizer is {kept.kind}, and not {kind}")
    if [group.get("params") for group in kept.groups] != names:
        raise InvalidInput(f"its {kind} has other groups of parameters")
    known = optimizer.state_dict()["param_groups"]
    groups = []
    for index, (saved, now) in enumerate(zip(kept.groups, known, strict=True)):
        values = {key: _as(now.get(key), value) for key, value in saved.items()}
        groups.append(values | _below(tensors, f"group/{index}/") | {"params": now["params"]})
    flat_names = [name for group in names for name in group]
    state = {
        number: kept.state[name] | _below(tensors, f"state/{name}/")
        for number, name in enumerate(flat_names)
        if name in kept.state
    }
    return {"state": state, "param_groups": groups}


def _names_in(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    try:
        return [[names[id(one)] for one in group["params"]] for group in optimizer.param_groups]
    except KeyError:
        raise InvalidInput(
            "the optimizer has a parameter that is none of the model's, and cannot be saved"
        ) from None


def _apart(values: Mapping[str, Any], prefix: str) -> tuple[dict[str, Any], Tensors]:
    """Return what JSON can hold, and the tensors."""
    scalars: dict[str, Any] = {}
    tensors: Tensors = {}
    for key, value in values.items():
        if isinstance(value, Tensor):
            tensors[f"{prefix}/{key}"] = value.detach()
        elif _is_plain(value):
            scalars[key] = value
        else:
            raise InvalidInput(
                f"the optimizer's {key!r} is {type(value).__name__}, which cannot be saved"
            )
    return scalars, tensors


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, bool | int | float | str)


def _as(now: object, value: Any) -> Any:
    """Return a saved value as it was: JSON has lists only."""
    return tuple(value) if isinstance(now, tuple) and isinstance(value, list) else value


def _below(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    """Return the tensors whose names begin so, by the rest of their names."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def differences(here: Mapping[str, Tensor], there: Mapping[str, Tensor]) -> Sequence[str]:
    """Return what keeps the model's tensors of a snapshot from fitting, one line each."""
    found = [f"{_short(name)} is not in it" for name in here.keys() - there.keys()]
    found += [f"{_short(name)} is not in the model" for name in there.keys() - here.keys()]
    for name in here.keys() & there.keys():
        if _said(here[name]) != _said(there[name]):
            found.append(f"{_short(name)} is {_said(there[name])}, and not {_said(here[name])}")
    return sorted(found)


def _short(name: str) -> str:
    return repr(name.removeprefix("model/"))


def _said(tensor: Tensor) -> str:
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')}"
