"""Training programs, and the observations that are compared between their wrappers.

A program is a public function whose first argument is `trial`. A second argument, `model`, is a
wrapped model: an `mlp()`, or that of the decorator `trains`. A program with a third argument,
`step`, returns the loss of this model, which is then trained. All others are generators: they
build modules, wrap them with `trial.wrap`, train, and yield values to compare (losses, outputs,
copies). After each yield, `Trial.look` also records each watched module (parameters, gradients,
buffers, number of forward passes) and the random streams. A program must not depend on the result
of `trial.wrap`: DistributedDataParallel, or Paceline's DataParallel with some exchange.
"""

import hashlib
import pickle
import random
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

BATCH = 4
DEADLINE_S = 30.0  # for a program with one wrapper
WAIT_S = 15.0  # for a message of another rank

Run = Callable[["Trial"], Iterator[Any]]  # a program


@dataclass(frozen=True)
class Program:
    """A program, and its expected behaviour.

    `raises`: class of the error that ends it under DistributedDataParallel, if any.
    `better`: why Paceline may continue where DistributedDataParallel raises.
    `refused_by`: exchanges that must refuse it, with an InvalidInput that contains `refusal`.
    `exact_by`: exchanges that are compared with one process on the samples of all ranks, because
    ranks diverge under DistributedDataParallel.
    `counts`: whether forward passes are counted, by a global hook that breaks torch.compile.
    `wait_s`: deadline of a rank that waits for another.
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
    """The names of an error's classes, its message, and the frames outside installed packages."""

    classes: tuple[str, ...]
    text: str
    frames: str

    @classmethod
    def of(cls, error: BaseException) -> "Raised":
        frames = traceback.extract_tb(error.__traceback__)
        own = [one for one in frames if "site-packages" not in one.filename][-6:]
        places = [f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in own]
        kinds = tuple(kind.__name__ for kind in type(error).__mro__)
        return cls(kinds, str(error), "; ".join(places))

    @property
    def family(self) -> str:
        """The built-in class that a user would catch."""
        known = ("RuntimeError", "ValueError", "TypeError", "AttributeError", "LookupError")
        return next((name for name in known if name in self.classes), self.classes[0])

    def __str__(self) -> str:
        return f"raised {self.classes[0]}: {self.text.strip().splitlines()[0] if self.text else ''}"


class Trial:
    """A rank in one run of a program.

    `kind`: the wrapper: "ddp", an exchange, "host_chunk_1", or "alone" (no wrapper: one process
    with all samples).
    """

    def __init__(self, rank: int, size: int, kind: str, wait_s: float = WAIT_S) -> None:
        self.rank, self.size, self.kind, self._wait_s = rank, size, kind, wait_s
        self._modules: list[nn.Module] = []
        self._runs: list[int] = []

    def wrap(self, module: nn.Module, watched: bool = True, **options: Any) -> Any:
        """Wrap a module, and observe it if `watched`."""
        if watched:
            self.watch(module)
        if self.kind == "alone":
            return self._from_rank_0(module)
        if self.is_torch:
            return DistributedDataParallel(module, **options)
        from paceline import DataParallel

        exchange, _, chunk = self.kind.partition("_chunk_")
        if chunk:
            options["chunk"] = int(chunk)
        return DataParallel(module, exchange=exchange, deadline_s=self._wait_s, **options)

    def _from_rank_0(self, module: nn.Module) -> nn.Module:
        """Broadcast rank 0's values, as wrappers do."""
        with torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:
                dist.broadcast(tensor, 0)
        return module

    def bare(self, model: nn.Module) -> nn.Module:
        """Return the module in a wrapper, or an unwrapped module itself."""
        return model.module if hasattr(model, "module") else model

    @property
    def is_torch(self) -> bool:
        return self.kind == "ddp"

    def watch(self, module: nn.Module) -> None:
        self._modules.append(module)
        self._runs.append(0)

    def count(self, module: nn.Module, _: Any) -> None:
        """Count forward passes of watched modules, as a hook of all modules."""
        for number, watched in enumerate(self._modules):
            if watched is module:
                self._runs[number] += 1

    def batch(
        self, step: int, *shape: int, dtype: torch.dtype | None = None, rank: int | None = None
    ) -> Tensor:
        """Return this (or another) rank's samples, without drawing from a random stream."""
        rank = self.rank if rank is None else rank
        generator = torch.Generator().manual_seed(1 + 1000 * rank + step)
        return torch.randn(*(shape or (BATCH, 6)), generator=generator, dtype=dtype)

    def share(self, step: int, *shape: int) -> Tensor:
        """Return this rank's samples, or those of all ranks for kind "alone"."""
        if self.kind != "alone":
            return self.batch(step, *shape)
        return torch.cat([self.batch(step, *shape, rank=rank) for rank in range(self.size)])

    def refused(self, act: Callable[[], Any]) -> Raised | None:
        """Call `act`, and return its error, or None."""
        try:
            act()
        except Exception as error:
            return Raised.of(error)
        return None

    def evaluated(self, model: nn.Module, step: int = 30) -> Tensor:
        """Return a model's outputs in eval mode, then switch to training mode."""
        model.eval()
        with torch.no_grad():
            answer = model(self.batch(step))
        model.train()
        return answer

    def look(self, yielded: Any) -> dict[str, Any]:
        """Return the yielded value, and the state of random streams and watched modules."""
        seen: dict[str, Any] = {"yielded": kept(yielded), "streams": streams()}
        for number, module in enumerate(self._modules):
            seen[f"module {number}"] = {
                "parameters": kept(dict(module.named_parameters())),
                "gradients": gradients(module),
                "buffers": kept(dict(module.named_buffers())),
                "runs": self._runs[number],
            }
        return seen


OURS = ("host", "host_chunk_1", "tree")  # exchanges that replace DDP's reducer


def observe(program: Program, trial: Trial) -> list[Any]:
    """Run a program, and return its observations step by step; an error comes last."""
    seen: list[Any] = []
    hook = register_module_forward_pre_hook(trial.count) if program.counts else None
    seed(100 + trial.rank)
    try:
        for yielded in chain(program.run(trial), ["the end"]):
            seen.append(trial.look(yielded))  # noqa: PERF401 - an error follows the observations
    except AssertionError:
        raise
    except Exception as error:
        seen.append(Raised.of(error))
    finally:
        if hook is not None:
            hook.remove()
    return seen


def kept(value: Any) -> Any:
    """Return a copy of a value, with tensors detached and cloned."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: kept(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [kept(one) for one in value]
    return value


def gradients(module: nn.Module) -> dict[str, Any]:
    return {name: kept(p.grad) for name, p in module.named_parameters()}


def state_of(module: nn.Module) -> dict[str, Any]:
    """Return a copy of a module's or wrapper's state_dict."""
    return kept(dict(module.state_dict()))


def seed(number: int) -> None:
    """Seed the random streams."""
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def streams() -> dict[str, str]:
    """Return digests of the random streams' states."""
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": pickle.dumps(np.random.get_state()),
        "random": repr(random.getstate()).encode(),
    }
    return {name: hashlib.sha256(state).hexdigest()[:12] for name, state in states.items()}
