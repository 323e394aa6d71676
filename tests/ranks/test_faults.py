"""A backward pass fails on some ranks, or a rank is killed or stopped, during training."""

import os
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from faults import failpoints
from paceline.core.errors import StepDiscarded, WorkerLost
from paceline.links.failpoints import reach
from pair import Failure, Ranks
from replicas import (
    PLACES,
    Net,
    batch,
    bits,
    build,
    check,
    device,
    each_place,
    mean,
    parallel_of,
    sgd,
    square,
    train,
)

DEADLINE_S = 3.0
SHARED_MEMORY = Path("/dev/shm")


class OwnError(Exception):
    """An error of the user's model."""


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        raise OwnError


class Fragile(Net):
    """A net that raises in backward at each "!" of `order`."""

    def forward(self, x: Tensor, order: str = "abc") -> Tensor:
        for name in order:
            x = _Raise.apply(x) if name == "!" else torch.tanh(getattr(self, name)(x))
        return x


def continues(exchange: str, fails: list[tuple[int, int]], where: str) -> list[tuple[int, str]]:
    """Train with failures at each (rank, step); return the skipped steps with their errors."""
    module, oracle = build(Fragile)
    parallel = parallel_of(module, exchange, deadline_s=2.0)
    optimizers, caught = (sgd(parallel), sgd(oracle)), []
    orders = dict.fromkeys(fails, where)
    for step in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        order = orders.get((dist.get_rank(), step), "abc")
        inputs = batch(dist.get_rank(), step).requires_grad_()
        try:
            parallel(inputs, order).square().mean().backward()
        except (OwnError, StepDiscarded) as error:
            caught.append((step, type(error).__name__))
            if isinstance(error, StepDiscarded):  # else the optimizer would use this rank's alone
                assert all(one.grad is None for one in module.parameters())
            continue
        mean(square, oracle, step).backward()
        for optimizer in optimizers:
            optimizer.step()
    check(parallel, oracle)
    return caught


FAILURES = {
    "in the middle": ([(1, 2)], "ab!c"),
    "before any gradient": ([(1, 2)], "abc!"),
    "after all gradients": ([(1, 2)], "!abc"),
    "in the first step": ([(1, 0)], "ab!c"),
    "in the first step, on rank 0": ([(0, 0)], "ab!c"),
    "on all ranks": ([(0, 2), (1, 2)], "ab!c"),
    "on all ranks in the first step": ([(0, 0), (1, 0)], "ab!c"),
    "by turns": ([(1, 1), (0, 2), (1, 3), (0, 4)], "ab!c"),
    "twice on one rank": ([(0, 2), (0, 3)], "ab!c"),
}


def failures_of_each_place() -> list[object]:
    """Return each failure for each exchange and place; most are marked slow."""
    return [
        pytest.param(*place, name, marks=[] if is_quick else pytest.mark.slow)
        for place in PLACES
        for name in FAILURES
        for is_quick in [name == "in the middle" or place in PLACES[1:3]]
    ]


@pytest.mark.parametrize(("exchange", "place", "name"), failures_of_each_place())
def test_a_failed_step_is_skipped_on_all_ranks_or_refused(ranks, exchange, name):
    """`tree` can discard only the first step; DDP requires all backward passes to finish."""
    fails, where = FAILURES[name]
    found = ranks(continues, exchange, fails, where, timeout_s=4.0, errors=True)
    if exchange == "allreduce" or (exchange == "tree" and max(step for _, step in fails) > 0):
        refused = [one for one in found if isinstance(one, Failure)]
        kind, field = ("InvalidInput", "exchange") if exchange == "tree" else ("RuntimeError", None)
        assert any(kind in one.kinds and one.fields.get("field") == field for one in refused)
        return
    failing = dict.fromkeys(fails, "OwnError")
    steps = sorted({step for _, step in fails})
    caught = [
        [(step, failing.get((rank, step), "StepDiscarded")) for step in steps] for rank in (0, 1)
    ]
    assert found == caught


class Sparse(nn.Embedding):
    """An embedding with sparse gradients, whose backward can fail."""

    def forward(self, words: Tensor, fails: bool) -> Tensor:
        return _Raise.apply(super().forward(words)) if fails else super().forward(words)


def fails_with_sparse_gradients(exchange: str) -> None:
    """Fail on rank 1 in step 1."""
    module, _ = build(partial(Sparse, 20, 6, sparse=True))
    parallel = parallel_of(module, exchange, deadline_s=2.0)
    for step in range(3):
        with suppress(OwnError):
            fails = (dist.get_rank(), step) == (1, 1)
            parallel(torch.arange(4), fails).square().mean().backward()


@pytest.mark.parametrize("exchange", ["host", "tree"])
def test_a_failed_step_with_only_sparse_gradients_is_refused(pair, exchange):
    _, failure = pair(fails_with_sparse_gradients, exchange, timeout_s=4.0, errors=True)
    assert isinstance(failure, Failure)
    assert failure.fields.get("field") == "exchange"


def fails_in_no_sync(exchange: str) -> str:
    """Fail in `no_sync`, where the user zeroes the partial gradients."""
    module, _ = build(Fragile)
    parallel = parallel_of(module, exchange, deadline_s=2.0)
    optimizer = sgd(parallel)
    for step in range(3):
        optimizer.zero_grad()
        with parallel.no_sync():
            order = "ab!c" if (dist.get_rank(), step) == (1, 1) else "abc"
            try:
                parallel(batch(dist.get_rank(), 50 + step), order).square().mean().backward()
            except OwnError:
                parallel.zero_grad()
        parallel(batch(dist.get_rank(), step)).square().mean().backward()
        optimizer.step()
    return check(parallel, parallel)


def fails_in_forward(exchange: str) -> str:
    """Fail once in forward on one rank, and repeat it; the failure has no effect."""
    module, oracle = build(Net)
    parallel = parallel_of(module, exchange)
    for step in range(4):
        if (dist.get_rank(), step) == (1, 2):
            with pytest.raises(RuntimeError, match="shape"):
                parallel(batch(dist.get_rank(), step, 4, 5))
        train(parallel, oracle, [step])
    return check(parallel, oracle)


@each_place
@pytest.mark.parametrize("program", [fails_in_no_sync, fails_in_forward])
def test_a_program_does_what_one_process_does(ranks, program, exchange):
    ranks(program, exchange)


# A rank is killed or stopped; the others name it in their errors.


class Victim(Net):
    """A net with a failpoint in each phase of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.step = -1
        self.register_buffer("seen", torch.zeros(6, dtype=torch.float64))

    def reach(self, phase: str) -> None:
        reach(f"test.{phase}", rank=dist.get_rank(), step=self.step)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        self.reach("construction")
        return super().named_buffers(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        self.seen += x.detach().sum(0)
        x = torch.tanh(self.b(x))
        if x.requires_grad:
            x.register_hook(lambda gradient: self.reach("backward"))
        return self.c(x)


def trains(exchange: str, victim: int, num_steps: int = 12) -> tuple[str, str]:
    """Train until a rank is lost; return the error and that rank's name."""
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    store = dist.distributed_c10d._get_default_store()
    survivors = [rank for rank in range(len(pids)) if rank != victim]
    try:
        with torch.device(device()):
            module = Victim()
        parallel = parallel_of(module, exchange, deadline_s=DEADLINE_S)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
        for module.step in range(num_steps):
            optimizer.zero_grad()
            parallel(batch(dist.get_rank(), module.step)).square().mean().backward()
            module.reach("optimizer")
            optimizer.step()
        return bits(module), ""
    except WorkerLost as error:
        return str(error), f"worker {victim} (process {pids[victim]})"
    finally:
        store.set(f"ended/{dist.get_rank()}", "")
        if dist.get_rank() == survivors[0] and victim in range(len(pids)):
            store.wait([f"ended/{rank}" for rank in survivors])
            with suppress(ProcessLookupError):  # the victim may have ended already
                os.kill(pids[victim], signal.SIGKILL)


def lost(ranks: Ranks, exchange: str, how: str, phase: str, victim: int) -> list[Any]:
    """Kill or stop a rank in a phase of a step; return the others' results."""
    step = {"construction": -1, "first backward": 0}.get(phase, 5)
    at = f"test.{phase.removeprefix('first ')}"
    with failpoints({"at": at, "rank": victim, "step": step, "do": how}):
        found = ranks(trains, exchange, victim, timeout_s=DEADLINE_S, errors=True)
    assert found[victim].kind == "Died"
    assert not [path for path in SHARED_MEMORY.iterdir() if "paceline" in path.name]
    return [one for rank, one in enumerate(found) if rank != victim]


BACKWARD = ("pair", "backward", 1)
QUICK = [
    *(("SIGKILL", "pair", phase, 1) for phase in ("construction", "first backward")),
    *(("SIGKILL", *BACKWARD), ("SIGSTOP", *BACKWARD)),
    *(("SIGKILL", "pair", "backward", 0), ("SIGKILL", "triple", "backward", 1)),
]
LONG = [
    ("SIGKILL", "pair", "optimizer", 1),
    *(("SIGSTOP", "pair", phase, 1) for phase in ("construction", "first backward", "optimizer")),
    *(("SIGSTOP", "pair", "optimizer", 0), ("SIGSTOP", "triple", "backward", 1)),
    *(("SIGKILL", "pair_on_gpus", one, 1) for one in ("first backward", "backward", "optimizer")),
    ("SIGSTOP", "pair_on_gpus", "backward", 1),
]


@pytest.mark.parametrize(
    ("how", "place", "phase", "victim"),
    [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in LONG)],
)
def test_the_others_name_the_lost_rank(ranks: Ranks, how, phase, victim):
    for text, named in lost(ranks, "host", how, phase, victim):
        assert named
        assert named in text
        assert "\n" not in text


@pytest.mark.parametrize("exchange", ["tree", "allreduce"])
@pytest.mark.parametrize(
    ("phase", "victim"), [("first backward", 1), ("backward", 1), ("optimizer", 0)]
)
@pytest.mark.slow
def test_exchanges_of_torch_stop_with_an_error(pair: Ranks, exchange: str, phase: str, victim: int):
    (one,) = lost(pair, exchange, "SIGKILL", phase, victim)
    assert isinstance(one, Failure) or one[1]


def pauses() -> str:
    """Resume rank 1 a second after a failpoint stops it, before the deadline."""
    if dist.get_rank() == 1 and os.fork() == 0:
        while "T" not in Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2][:3]:
            time.sleep(0.01)
        time.sleep(1.0)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    return trains("host", 99)[0]


@pytest.mark.slow
def test_a_rank_that_pauses_for_less_than_the_deadline_is_waited_for(pair: Ranks):
    with failpoints({"at": "test.backward", "rank": 1, "step": 5, "do": "SIGSTOP"}):
        first, second = pair(pauses)
    assert first == second
