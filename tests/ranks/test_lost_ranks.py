"""A rank is killed or stopped; the others name it in their errors."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from faults import failpoints
from paceline.core.errors import WorkerLost
from paceline.links.failpoints import reach
from pair import Failure, Ranks
from replicas import Net, batch, bits, device, parallel_of

DEADLINE_S = 3.0
SHARED_MEMORY = Path("/dev/shm")


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
        self.reach("forward")
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
    *(("SIGKILL", "pair", phase, 1) for phase in ("forward", "optimizer")),
    *(("SIGSTOP", "pair", phase, 1) for phase in ("construction", "first backward")),
    *(("SIGSTOP", "pair", phase, 1) for phase in ("forward", "optimizer")),
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
