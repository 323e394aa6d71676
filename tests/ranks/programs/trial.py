"""Programs of the kind that people train, and what can be seen of one while it runs.

A program is a public function whose first argument is `trial`; a second one is a model, an `mlp()`
unless `trains` says more; one with a third, `step`, is the loss of this model, which is trained.
Others are generators: they make modules, wrap them with `trial.wrap`, train, and yield what they
want compared (losses, outputs, copies). After each yield the harness looks by itself at every
wrapped module (parameters, gradients, buffers, how often its forward ran) and at the random
streams. What a program yields and does must not depend on what `trial.wrap` returns:
DistributedDataParallel, or Paceline's DataParallel with one exchange or another.
"""

import hashlib
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

BATCH = 4
DEADLINE_S = 30.0  # for a program with one kind of wrapper
WAIT_S = 15.0  # for a rank that waits in vain for another

Run = Callable[["Trial"], Iterator[Any]]  # a program


@dataclass(frozen=True)
class Program:
    """A program, and what is known of it.

    `raises` is the class of the error that it ends with under DistributedDataParallel, if any, and
    `better` says why Paceline may go on there. `refused_by` are the exchanges that must refuse it
    with InvalidInput, which says `refusal`. `exact_by` are the exchanges that are compared with one
    process on the samples of all ranks: DistributedDataParallel lets ranks go apart here. With
    `counts` off nobody counts how often forward runs: global hooks are nothing for torch.compile. A
    rank waits `wait_s` for another.
    """

    run: Run
    raises: str = ""
    better: str = ""
    refused_by: tuple[str, ...] = ()
    refusal: str = ""
    exact_by: tuple[str, ...] = ()
    counts: bool = True
    deadline_s: float = DEADLINE_S
    wait_s: float = WAIT_S


@dataclass(frozen=True)
class Raised:
    """An error: the names of its classes, and what it says."""

    classes: tuple[str, ...]
    text: str

    @classmethod
    def of(cls, error: BaseException) -> "Raised":
        return cls(tuple(kind.__name__ for kind in type(error).__mro__), str(error))

    @property
    def family(self) -> str:
        """What a user would write in `except`."""
        known = ("RuntimeError", "ValueError", "TypeError", "AttributeError", "LookupError")
        return next((name for name in known if name in self.classes), self.classes[0])

    def __str__(self) -> str:
        return f"{self.classes[0]}: {self.text.strip().splitlines()[0] if self.text else ''}"


class Trial:
    """A rank in one run of a program: `kind` is what wraps its modules.

    "ddp", "alone" (nothing does: one process with all samples), or one of `COLUMNS`.
    """

    def __init__(self, rank: int, size: int, kind: str, wait_s: float = WAIT_S) -> None:
        self.rank, self.size, self.kind, self._wait_s = rank, size, kind, wait_s
        self._modules: list[nn.Module] = []
        self._runs: list[int] = []

    def wrap(self, module: nn.Module, watched: bool = True, **options: Any) -> Any:
        """Make a module parallel, and look at it from now on."""
        if watched:
            self.watch(module)
        if self.kind == "alone":
            return self._from_rank_0(module)
        if self.is_torch:
            return DistributedDataParallel(module, **options)
        from paceline import DataParallel

        own = {"deadline_s": self._wait_s, **COLUMNS[self.kind]}
        return DataParallel(module, **options, **own)

    def _from_rank_0(self, module: nn.Module) -> nn.Module:
        """Give a module rank 0's first values, as wrappers do."""
        with torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:
                dist.broadcast(tensor, 0)
        return module

    def bare(self, model: nn.Module) -> nn.Module:
        """The module in a wrapper, or what was not wrapped."""
        return model.module if hasattr(model, "module") else model

    @property
    def is_torch(self) -> bool:
        return self.kind == "ddp"

    def watch(self, module: nn.Module) -> None:
        self._modules.append(module)
        self._runs.append(0)

    def count(self, module: nn.Module, _: Any) -> None:
        """Note, as a hook of all modules, that a module's forward runs."""
        for number, watched in enumerate(self._modules):
            if watched is module:
                self._runs[number] += 1

    def seed(self) -> None:
        """Begin with this rank's own random streams."""
        torch.manual_seed(100 + self.rank)
        np.random.seed(100 + self.rank)
        random.seed(100 + self.rank)

    def batch(self, step: int, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The samples of this rank in a step: no random stream moves."""
        return self._batch_of(self.rank, step, *shape, dtype=dtype)

    def share(self, step: int, *shape: int) -> Tensor:
        """The samples of this rank, or of all where there is but one process."""
        if self.kind != "alone":
            return self.batch(step, *shape)
        return torch.cat([self._batch_of(rank, step, *shape) for rank in range(self.size)])

    def _batch_of(
        self, rank: int, step: int, *shape: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        generator = torch.Generator().manual_seed(1 + 1000 * rank + step)
        return torch.randn(*(shape or (BATCH, 6)), generator=generator, dtype=dtype)

    def refused(self, act: Callable[[], Any]) -> Raised | None:
        """Do something that may be refused, and return how it was."""
        try:
            act()
        except Exception as error:
            return Raised.of(error)
        return None

    def evaluated(self, model: nn.Module, step: int = 30) -> Tensor:
        """What a model answers in evaluation, before it is trained on."""
        model.eval()
        with torch.no_grad():
            answer = model(self.batch(step))
        model.train()
        return answer

    def look(self, yielded: Any) -> dict[str, Any]:
        """Return all that can be seen now."""
        seen: dict[str, Any] = {"yielded": kept(yielded), "streams": streams()}
        for number, module in enumerate(self._modules):
            seen[f"module {number}"] = {**seen_of(module), "runs": self._runs[number]}
        return seen


OURS = ("host", "host_chunk_1", "tree")  # exchanges that are not torch's own
COLUMNS: dict[str, dict[str, Any]] = {
    "allreduce": {"exchange": "allreduce"},
    "host": {"exchange": "host"},
    "host_chunk_1": {"exchange": "host", "chunk": 1},
    "tree": {"exchange": "tree"},
    "auto": {"exchange": "auto"},
}


def observe(program: Program, trial: Trial) -> list[Any]:
    """Run a program and return all that was seen, step by step; an error comes last."""
    seen: list[Any] = []
    hook = register_module_forward_pre_hook(trial.count) if program.counts else None
    trial.seed()
    try:
        for yielded in chain(program.run(trial), ["the end"]):
            seen.append(trial.look(yielded))  # noqa: PERF401 - an error comes after what was seen
    except AssertionError:
        raise
    except Exception as error:
        seen.append(error)
    finally:
        if hook is not None:
            hook.remove()
    return seen


def kept(value: Any) -> Any:
    """A copy of a value in which no tensor changes any more."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: kept(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [kept(one) for one in value]
    return value


def seen_of(module: nn.Module) -> dict[str, Any]:
    """The parameters, gradients and buffers of a module, by name."""
    named = dict(module.named_parameters())
    return {
        "parameters": kept(named),
        "gradients": gradients(module),
        "buffers": kept(dict(module.named_buffers())),
    }


def gradients(module: nn.Module) -> dict[str, Any]:
    return {name: kept(p.grad) for name, p in module.named_parameters()}


def state_of(module: nn.Module) -> dict[str, Any]:
    """Its state, under the module's own names or the wrapper's."""
    return kept(dict(module.state_dict()))


def streams() -> dict[str, str]:
    """Digests of the states of the random streams."""
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": pickle.dumps(np.random.get_state()),
        "random": repr(random.getstate()).encode(),
    }
    return {name: hashlib.sha256(state).hexdigest()[:12] for name, state in states.items()}
