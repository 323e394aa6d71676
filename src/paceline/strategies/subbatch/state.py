"""Save and load the state of training with a split head.

Rank 0 gathers the rows of split tensors. Each rank loads its own rows, so the number of ranks may
change. A checkpoint has these files:

    model.safetensors        the whole model
    optimizer.safetensors    the tensors of optimizers, named OPTIMIZER/...
    training.json            all other values of optimizers and schedulers, and the number of steps
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.checkpoints import tensor_file
from paceline.checkpoints.json_values import Json
from paceline.checkpoints.state import (
    check_same,
    kind_of,
    load_optimizer_state,
    load_schedule_state,
    module_state,
    optimizer_state,
    schedule_state,
)
from paceline.core.errors import InvalidInput
from paceline.exchange.checkpoints import State
from paceline.links.group import Group
from paceline.training.models.sharded import Sharding

_TRAINING = "training"  # name of the checkpoint's JSON part, training.json
# How each layer of the head is split among ranks, by layer name. A layer's tensors have one row per
# output.
Head = Mapping[str, Sharding]


@dataclass(frozen=True)
class _SavedTensor:
    """This rank's part of a saved tensor; `sharding`: None if all ranks have the whole tensor."""

    tensor: Tensor
    sharding: Sharding | None

    @classmethod
    def of(cls, tensor: Tensor, name: str, head: Head) -> "_SavedTensor":
        """Combine a tensor with its layer's sharding; `name`: the parameter or buffer it is for."""
        return cls(tensor, head.get(name.rpartition(".")[0]) if tensor.dim() else None)

    @property
    def whole(self) -> Tensor:
        """A tensor on the meta device with the shape and dtype of the whole tensor."""
        shape, dtype = list(self.tensor.shape), self.tensor.dtype
        if self.sharding is not None:
            shape[0] = self.sharding.num_outputs
        return torch.empty(shape, dtype=dtype, device="meta")

    def rows_of(self, rank: int) -> Tensor:
        """Return the rows of `rank`; `self.tensor` must be the whole tensor, not a part."""
        return self.tensor if self.sharding is None else self.sharding.shard(rank)(self.tensor)


def save(path: Path, model: nn.Module, head: Head, group: Group) -> None:
    """Write the whole model to rank 0's `path`; all ranks call it together.

    Rank 0 gathers one tensor at a time, so its memory need not hold the whole model.
    """
    tensors = _tensors(model, head)
    if group.rank != 0:
        for one in tensors.values():
            _gathered(one, group)
        return
    with path.open("wb") as file:
        file.write(tensor_file.header({name: one.whole for name, one in tensors.items()}))
        for one in tensors.values():
            whole = _gathered(one, group)
            assert whole is not None  # this is rank 0, where `_gathered` returns a tensor
            file.writelines(tensor_file.pieces(whole))


@dataclass(frozen=True)
class SplitState:
    """Saves and loads a rank's part of the training state.

    The keys of `optimizers` and `schedules` are the names of the modules that they update.
    """

    model: nn.Module
    head: Head
    optimizers: Mapping[str, Optimizer]
    schedules: Mapping[str, LRScheduler]
    group: Group

    def gather(self, num_steps: int) -> State:
        """Return copies of the whole state on rank 0, and an empty state on other ranks.

        All ranks must call it together.
        """
        saved = {f"model/{name}": one for name, one in _tensors(self.model, self.head).items()}
        values: dict[str, Json] = {}
        for updated, optimizer in self.optimizers.items():
            tensors, values[updated] = optimizer_state(optimizer, self.model.named_parameters())
            values[updated]["parameters"] = self._kinds(values[updated])
            for key, tensor in tensors.items():
                saved[f"optimizer/{updated}/{key}"] = self._part_of(tensor, key)
        gathered = {name: _gathered(one, self.group) for name, one in saved.items()}
        if self.group.rank != 0:
            return State({}, {})
        parts = {
            "optimizers": values,
            "schedules": {updated: schedule_state(one) for updated, one in self.schedules.items()},
            "num_steps": num_steps,
        }
        return State({n: one for n, one in gathered.items() if one is not None}, {_TRAINING: parts})

    def load(self, state: State) -> int:
        """Load this rank's part of a state from `gather`, and return the saved number of steps.

        Raises InvalidInput if the state is from another strategy, model, optimizer or scheduler.
        """
        saved = state.own_part(_TRAINING)
        try:
            for what, known in (("optimizers", self.optimizers), ("schedules", self.schedules)):
                names = (dict.fromkeys(one, "there") for one in (known, saved[what]))
                check_same(what, "that of", *names)
            load_tensors(state.file("model"), self.model, self.head, self.group.rank)
            for updated, optimizer in self.optimizers.items():
                tensors = state.file(f"optimizer/{updated}")
                self._load(optimizer, tensors, saved["optimizers"][updated])
            for updated, schedule in self.schedules.items():
                load_schedule_state(schedule, saved["schedules"][updated])
        except InvalidInput as error:
            raise InvalidInput("resume", str(error)) from None
        num_steps: int = saved["num_steps"]
        return num_steps

    def _load(self, optimizer: Optimizer, tensors: Mapping[str, Tensor], saved: Json) -> None:
        _, now = optimizer_state(optimizer, self.model.named_parameters())
        check_same("optimizer", "parameter", self._kinds(now), saved.get("parameters", {}))
        rank = self.group.rank
        rows = {key: self._part_of(one, key).rows_of(rank) for key, one in tensors.items()}
        values = saved | {"parameters": now["parameters"]}
        load_optimizer_state(optimizer, self.model.named_parameters(), rows, values)

    def _part_of(self, tensor: Tensor, key: str) -> _SavedTensor:
        """Return an optimizer's tensor with its sharding; `key`: "state/PARAMETER/FIELD"."""
        name = key.removeprefix("state/").rpartition("/")[0]
        return _SavedTensor.of(tensor, name, self.head)

    def _kinds(self, values: Json) -> dict[str, str]:
        """Return the shapes and dtypes of an optimizer's whole (unsplit) parameters, by name."""
        named = self.model.named_parameters()
        own = ((n, one) for n, one in named if n in values["parameters"])
        return {n: kind_of(_SavedTensor.of(one, n, self.head).whole) for n, one in own}


def load_tensors(tensors: Mapping[str, Tensor], model: nn.Module, head: Head, rank: int) -> None:
    """Load a rank's part of a model's tensors; raise InvalidInput if names or shapes differ."""
    own = _tensors(model, head)
    wanted = {name: kind_of(one.whole) for name, one in own.items()}
    check_same("model", "tensor", wanted, {name: kind_of(one) for name, one in tensors.items()})
    with torch.no_grad():
        for name, one in own.items():
            one.tensor.copy_(_SavedTensor(tensors[name], one.sharding).rows_of(rank))


def _tensors(model: nn.Module, head: Head) -> dict[str, _SavedTensor]:
    """Return the model's tensors in file order; tied tensors have only their first name."""
    state = tensor_file.in_file_order(module_state(model))
    return {name: _SavedTensor.of(tensor, name, head) for name, tensor in state.items()}


def _gathered(saved: _SavedTensor, group: Group) -> Tensor | None:
    """Return a copy of the whole tensor on rank 0, and None on other ranks."""
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
