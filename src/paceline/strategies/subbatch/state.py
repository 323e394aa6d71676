"""The state of a training whose head is sharded, in whole form, for any number of ranks.

Rank 0 gathers the rows of a split tensor, and any number of ranks takes the rows that it has. A
checkpoint has the optimizers' tensors, too, as one optimizer of the whole model has them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoints import tensor_file
from paceline.checkpoints.state import module_state
from paceline.core.errors import InvalidInput, first_line
from paceline.exchange.checkpoints import State
from paceline.links.group import Group
from paceline.strategies.subbatch.layers import Sharding


@dataclass(frozen=True)
class _SavedTensor:
    """A tensor in a file: this rank's part of it, and how its rows are shared, if they are."""

    tensor: Tensor
    sharding: Sharding | None

    @property
    def shape(self) -> list[int]:
        """The shape of the whole tensor."""
        rows = list(self.tensor.shape[:1]) if self.sharding is None else [self.sharding.num_outputs]
        return [*rows, *self.tensor.shape[1:]]


def save(path: Path, model: nn.Module, head: Mapping[str, Sharding], group: Group) -> None:
    """Write the whole model to `path`, as rank 0 sees it; all ranks call it together.

    `head` has the layers of the head, whose tensors have one row for each of this rank's outputs.
    Tensors that the model has under several names are written under the first. Rank 0 holds one
    whole tensor at a time.
    """
    tensors = _tensors(model, head)
    if group.rank != 0:
        for one in tensors.values():
            _gathered(one, group)
        return
    shapes = {name: (one.tensor.dtype, one.shape) for name, one in tensors.items()}
    with path.open("wb") as file:
        file.write(tensor_file.header(shapes))
        for one in tensors.values():
            whole = _gathered(one, group)
            assert whole is not None  # on rank 0
            file.writelines(tensor_file.pieces(whole))


def _tensors(model: nn.Module, head: Mapping[str, Sharding]) -> dict[str, _SavedTensor]:
    """Return the tensors of the model's state, shared ones once, in the order of a file."""
    return {
        name: _SavedTensor(tensor, head.get(name.rpartition(".")[0]) if tensor.dim() else None)
        for name, tensor in tensor_file.in_file_order(module_state(model)).items()
    }


@dataclass(frozen=True)
class WholeState:
    """The state of a training as if one process had the whole model.

    `tensors` are the model's, by the names that `save` writes. `optimizers` and `schedules` have
    what their `state_dict` returns, by what they update: "model"; or, where the head is updated
    with each sub-batch, "body" and each of its layers. `num_steps` have been taken.
    """

    tensors: Mapping[str, Tensor]
    optimizers: Mapping[str, Mapping[str, Any]]
    schedules: Mapping[str, Mapping[str, Any]]
    num_steps: int


def in_files(whole: WholeState) -> State:
    """Return the state as the files of a checkpoint: tensors by FILE/NAME, and plain values."""
    tensors = {f"model/{name}": tensor for name, tensor in whole.tensors.items()}
    optimizers: dict[str, Any] = {}
    for name, saved in whole.optimizers.items():
        plain: dict[int, dict[str, Any]] = {}
        for number, found in saved["state"].items():
            plain[number] = {k: v for k, v in found.items() if not isinstance(v, Tensor)}
            of_parameter = f"optimizer/{name}/{number}"
            tensors |= {f"{of_parameter}/{k}": v for k, v in found.items() if isinstance(v, Tensor)}
        optimizers[name] = {**saved, "state": plain}
    parts = {"optimizers": optimizers, "schedules": whole.schedules, "num_steps": whole.num_steps}
    return State(tensors, {"training": parts})


def from_files(state: State) -> WholeState:
    """Return the state that `in_files` has made files of; InvalidInput if it is another's."""
    if "training" not in state.parts:
        raise InvalidInput(
            "resume", "the run had a strategy that does not split a head", hint="take that"
        )
    parts, optimizers = state.parts["training"], dict[str, Any]()
    for name, saved in parts["optimizers"].items():
        optimizers[name] = {**saved, "state": {n: dict(one) for n, one in saved["state"].items()}}
    for key, tensor in state.file("optimizer").items():
        name, number, field = key.rsplit("/", 2)
        optimizers[name]["state"][int(number)][field] = tensor
    return WholeState(state.file("model"), optimizers, parts["schedules"], parts["num_steps"])


def gather_tensors(
    model: nn.Module, head: Mapping[str, Sharding], group: Group
) -> dict[str, Tensor]:
    """Return copies of all tensors of the model on rank 0, and nothing on others.

    All ranks call it together; `head` is that of `save`.
    """
    gathered = {name: _gathered(one, group) for name, one in _tensors(model, head).items()}
    return {name: tensor for name, tensor in gathered.items() if tensor is not None}


def load_tensors(
    tensors: Mapping[str, Tensor], model: nn.Module, head: Mapping[str, Sharding], rank: int
) -> None:
    """Load a rank's part of a whole model's tensors, as `safetensors.torch.load_file` maps them.

    Raises InvalidInput for one that does not fit.
    """
    own = _tensors(model, head)
    if different := set(tensors) ^ set(own):
        name = min(different)
        raise InvalidInput(
            "checkpoint", f"{name!r} is in {('it' if name in tensors else 'the model')} alone"
        )
    for name, one in own.items():
        rows = _cut(tensors[name], one, rank, name)
        if rows.dtype != one.tensor.dtype:
            raise InvalidInput("checkpoint", f"{name} is {rows.dtype}, and not {one.tensor.dtype}")
        with torch.no_grad():
            one.tensor.copy_(rows)


def gather_optimizer(
    optimizer: Optimizer, shardings: Mapping[nn.Parameter, Sharding], group: Group
) -> dict[str, Any]:
    """Return the optimizer's state on rank 0, with all rows of split parameters' tensors.

    `shardings` are those of the parameters that are split. All ranks call it together; on others
    the state has no tensors.
    """
    state = optimizer.state_dict()
    whole: dict[int, dict[str, Any]] = {}
    for number, parameter in enumerate(_parameters(optimizer)):
        found = state["state"].get(number, {})
        whole[number] = {}
        for key, value in found.items():
            if isinstance(value, Tensor):
                sharding = shardings.get(parameter) if value.dim() else None
                value = _gathered(_SavedTensor(value, sharding), group)
            whole[number][key] = value
    return {**state, "state": {number: one for number, one in whole.items() if one}}


def load_optimizer(
    state: Mapping[str, Any],
    optimizer: Optimizer,
    shardings: Mapping[nn.Parameter, Sharding],
    rank: int,
) -> None:
    """Load a rank's part of a state of the whole model; InvalidInput if it does not fit."""
    own: dict[int, dict[str, Any]] = {}
    for number, parameter in enumerate(_parameters(optimizer)):
        found = state["state"].get(number, {})
        own[number] = dict(found)
        for key, value in found.items():
            if not isinstance(value, Tensor):
                continue
            sharding = shardings.get(parameter) if value.dim() else None
            if sharding is not None:
                saved = _SavedTensor(parameter, sharding)
                value = _cut(value, saved, rank, f"{key} of parameter {number}")
            own[number][key] = value.clone()  # which training changes in place
    try:
        optimizer.load_state_dict(
            {**state, "state": {number: one for number, one in own.items() if one}}
        )
    except (KeyError, ValueError) as error:
        raise InvalidInput(
            "checkpoint",
            f"its optimizer is another than {type(optimizer).__name__}: {first_line(error)}",
        ) from error


def _gathered(saved: _SavedTensor, group: Group) -> Tensor | None:
    """Return a copy of a whole tensor on rank 0, and None on others."""
    own = saved.tensor.detach().cpu().contiguous()
    if saved.sharding is None:
        return own.clone() if group.rank == 0 else None
    with group.naming_lost_ranks():
        if group.rank != 0:
            dist.send(own, 0, group=group.control)
            return None
        parts = [own]
        for rank, size in enumerate(saved.sharding.sizes[1:], 1):
            parts.append(torch.empty(size, *own.shape[1:], dtype=own.dtype))
            dist.recv(parts[-1], rank, group=group.control)
    return torch.cat(parts)


def _cut(whole: Tensor, saved: _SavedTensor, rank: int, name: str) -> Tensor:
    """Return a rank's rows of a whole tensor; InvalidInput if that has another shape."""
    if list(whole.shape) != saved.shape:
        raise InvalidInput(
            "checkpoint", f"{name} is of shape {list(whole.shape)}, and not {saved.shape}"
        )
    return saved.sharding.shard(rank)(whole) if saved.sharding else whole


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters in the order in which a state numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
