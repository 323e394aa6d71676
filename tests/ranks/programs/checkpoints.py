"""Saving, loading, pickling and deletion of wrappers."""

import copy
import gc
import io
import pickle
import shutil
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from declared import program, trains
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from steps import backward, learn, mlp, normed, sgd, squares, trained
from trial import kept, state_of


def saved(thing: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return file


@trains(normed)
def checkpoint_of_the_wrapper(trial, model):
    """Names have DDP's prefix, and training resumes from the checkpoint with the same results."""
    optimizer = sgd(model)
    yield from trained(model, squares(trial), optimizer)
    yield list(model.state_dict())
    file = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    fresh = trial.wrap(normed())
    other = sgd(fresh)
    loaded = torch.load(file)
    yield str(fresh.load_state_dict(loaded["model"]))
    other.load_state_dict(loaded["optimizer"])
    yield from trained(fresh, squares(trial), other)
    yield from trained(model, squares(trial), optimizer)


@trains(normed)
def checkpoint_of_ddp_into_a_bare_module(trial, model):
    yield from trained(model, squares(trial))
    state = model.state_dict()
    consume_prefix_in_state_dict_if_present(state, "module.")
    bare = normed()
    yield str(bare.load_state_dict(state))
    yield state_of(bare)


@trains(normed)
def checkpoint_of_the_module(trial, model):
    """Load a wrapped module's state into a bare module, then into another wrapped module."""
    yield from trained(model, squares(trial))
    bare = normed()
    bare.load_state_dict(model.module.state_dict())
    yield state_of(bare)
    fresh = trial.wrap(normed())
    fresh.module.load_state_dict(bare.state_dict())
    yield from trained(fresh, squares(trial))


@program(raises="RuntimeError", better="a checkpoint of the bare module is accepted, too")
def checkpoint_without_prefix_into_the_wrapper(trial):
    model = trial.wrap(mlp())
    state = {name: value * 0.5 for name, value in model.module.state_dict().items()}
    model.load_state_dict(state)
    yield state_of(model)


def checkpoint_loaded_on_rank_0_only(trial):
    """Load on rank 0 before wrapping; construction broadcasts the state."""
    module = normed()
    if trial.rank == 0:
        module.load_state_dict({n: v * 0.5 for n, v in normed().state_dict().items()})
    yield from trained(trial.wrap(module), squares(trial))


@trains(lambda: mlp(6, 8, 3))
def checkpoint_that_does_not_fit(trial, model):
    state = model.state_dict()
    state.pop("module.0.bias")
    yield trial.refused(lambda: model.load_state_dict(state))
    yield [str(model.load_state_dict(state, strict=False))]
    wrong = {name: torch.zeros(2, 2) for name in model.state_dict()}
    yield trial.refused(lambda: model.load_state_dict(wrong))
    yield from trained(model, squares(trial))


def checkpoint_loaded_in_the_middle(trial, model):
    """Return to an earlier state during training."""
    best = copy.deepcopy(model.state_dict())
    yield from trained(model, squares(trial))
    model.load_state_dict(best)
    yield from trained(model, squares(trial))


def checkpoint_within_a_larger_module(trial):
    """Save and load a module that contains a wrapper, with DDP's names."""
    whole = nn.ModuleDict({"part": trial.wrap(mlp()), "other": nn.Linear(2, 2)})
    yield list(whole.state_dict())
    halved = {name: value * 0.5 for name, value in whole.state_dict().items()}
    yield str(whole.load_state_dict(halved))
    yield kept(dict(whole["part"].state_dict()))


@trains(normed)
def distributed_checkpoint_state_dicts(trial, model):
    """get_state_dict removes DDP's prefix, and set_state_dict adds it."""
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-3)
    yield from trained(model, squares(trial), optimizer)
    yield kept(get_model_state_dict(model))
    yield kept(get_optimizer_state_dict(model, optimizer))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    yield kept(get_model_state_dict(model, options=options))
    states = get_state_dict(model, optimizer)
    fresh = trial.wrap(normed())
    other = torch.optim.AdamW(fresh.parameters(), eps=1e-3)
    set_state_dict(fresh, other, model_state_dict=kept(states[0]), optim_state_dict=kept(states[1]))
    yield from trained(fresh, squares(trial), other)
    set_model_state_dict(model, {name: v * 0.5 for name, v in states[0].items()})
    yield state_of(model)


@trains(normed)
def distributed_checkpoint_in_files(trial, model):
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-3)
    yield from trained(model, squares(trial), optimizer)
    names = [tempfile.mkdtemp() if trial.rank == 0 else None]
    dist.broadcast_object_list(names)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=names[0])
    yield from trained(model, squares(trial), optimizer)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=names[0])
    set_state_dict(
        model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
    )
    yield state_of(model)
    dist.barrier()
    if trial.rank == 0:
        shutil.rmtree(names[0])
    yield from trained(model, squares(trial), optimizer)


@trains(normed)
def wrapper_saved_as_a_whole(trial, model):
    """Save a whole wrapper with torch.save, and train the loaded one on all ranks."""
    yield from trained(model, squares(trial))
    loaded = torch.load(saved(model), weights_only=False)
    trial.watch(loaded)
    yield type(loaded) is type(model)
    yield from trained(loaded, squares(trial))


@trains(normed, find_unused_parameters=True, broadcast_buffers=False)
def wrapper_pickled_before_training(trial, model):
    loaded = pickle.loads(pickle.dumps(model))
    trial.watch(loaded)
    yield [loaded.find_unused_parameters, loaded.broadcast_buffers]
    yield from trained(loaded, squares(trial))


@trains(normed)
def module_saved_as_a_whole_while_it_is_wrapped(trial, model):
    """The wrapped module has no hooks that torch.save cannot pickle."""
    yield from trained(model, squares(trial))
    loaded = torch.load(saved(model.module), weights_only=False)
    copied = copy.deepcopy(model.module)
    for one in (loaded, copied):
        trial.watch(one)
        yield backward(one(trial.batch(50)).sum())
    yield from trained(model, squares(trial))


def wrapper_that_is_dropped(trial):
    """Without its wrapper, a module trains without an exchange, and may be wrapped again."""
    module = normed()
    model = trial.wrap(module)
    yield from trained(model, squares(trial))
    gone = weakref.ref(model)
    del model
    gc.collect()
    yield gone() is None
    module.zero_grad()
    yield learn(trial, module, 20)
    if trial.rank == 0:  # no other rank runs this
        learn(trial, module, 21)
    yield _hooks(module)
    yield from trained(trial.wrap(module, watched=False), squares(trial))


def _hooks(module: nn.Module) -> list[int]:
    """Count the hooks left on the module and its parameters."""
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [
        sum(len(getattr(one, name)) for one in module.modules() for name in hooks),
        sum(len(p._backward_hooks or ()) for p in module.parameters()),
        sum(len(p._post_accumulate_grad_hooks or ()) for p in module.parameters()),
    ]


def module_memory_freed_with_its_wrapper(trial):
    module = normed()
    model = trial.wrap(module, watched=False)
    yield from trained(model, squares(trial))
    gone = [weakref.ref(model), weakref.ref(module), weakref.ref(module[0].weight)]
    del model, module
    gc.collect()
    yield [one() is None for one in gone]


def wrapper_dropped_before_it_was_used(trial):
    module = mlp()
    for _ in range(3):
        trial.wrap(module, watched=False)
        gc.collect()
    yield _hooks(module)
    yield from trained(trial.wrap(module), squares(trial))


def many_wrappers_one_after_another(trial):
    """Create wrappers one after another; threads and open files do not accumulate."""
    counts = []
    for _ in range(8):
        model = trial.wrap(mlp(), watched=False)
        for step in range(2):
            learn(trial, model, step)
        del model
        gc.collect()
        counts.append([len([*Path("/proc/self", one).iterdir()]) for one in ("task", "fd")])
    yield [later <= earlier for earlier, later in zip(counts[3], counts[-1], strict=True)]
    yield threading.active_count() <= 1 or "threads in Python are left"


def state_dict_hooks_and_extra_state(trial):
    class Extra(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.seen = mlp(), 3

        def get_extra_state(self) -> Any:
            return {"seen": self.seen}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state["seen"]

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return self.net(x)

    model = trial.wrap(Extra())
    yield from trained(model, squares(trial))
    state = model.state_dict()
    yield [list(state), state["module._extra_state"]]
    fresh = trial.wrap(Extra())
    fresh.load_state_dict(state)
    yield fresh.module.seen
