"""Train a worker with LocalUpdates or torchft's DiLoCo; benchmarks/local/elastic.py starts it.

    python elastic_worker.py faults NAME SYNC_EVERY
    python elastic_worker.py paceline|torchft NAME NUM_STEPS SYNC_EVERY SEED [CODEC]

TORCHFT_LIGHTHOUSE contains the lighthouse's address; the replica group's store is in this process.
Results are written to NAME.PID.jsonl, one JSON object per line. In a run with faults, NAME.order
contains the next fault, which occurs at a failpoint of the next exchange; the run ends as soon as a
file `end` exists.
"""

import json
import os
import sys
import time
from contextlib import suppress
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torchft
from sized_gpt import tiny
from torch import nn
from torch.distributed import TCPStore
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from torchft.local_sgd import DiLoCo

import paceline
from paceline.links.failpoints import ARMED
from paceline.training.recipes.optimizers import schedule_of

_LOOPBACK, _DEADLINE, _QUORUM = "127.0.0.1", timedelta(seconds=5), timedelta(seconds=300)
_BATCH_SIZE, _TOKENS_BATCH_SIZE, _WIDTH = 48, 16, 32
_STEP_S = 0.02  # slept instead of computing a larger model, because processes share two cores
_TEST_BATCH_SIZE, _TEST_BATCHES = 64, 20
_OUTER_RATE, _OUTER_MOMENTUM = 0.7, 0.5


def say(name: str, **values: object) -> None:
    """Append a line of JSON to this process's file."""
    with Path(f"{name}.{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(values) + "\n")


def manager_of(name: str, **functions: Any) -> Any:
    """Return a manager whose replica group is this process, with its own store."""
    store = TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)
    made = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=_DEADLINE),
        **({"load_state_dict": None, "state_dict": None} | functions),
        min_replica_size=1,
        use_async_quorum=False,
        timeout=_DEADLINE,
        quorum_timeout=_QUORUM,
        replica_id=name,
        rank=0,
        world_size=1,
        store_addr=_LOOPBACK,
        store_port=store.port,
        hostname=_LOOPBACK,
    )
    made.store_of_worker = store  # keep the store alive as long as the manager
    return made


def train_among_faults(name: str, every: int) -> None:
    """Train until a file `end` exists, and arm each ordered fault.

    The perceptron of 100,000 parameters learns a product of its inputs. Each step adds a byte to a
    file, so that steps of killed processes are counted, too.
    """
    steps = Path(f"{name}.{os.getpid()}.steps").open("ab", 0)  # noqa: SIM115
    hidden = (nn.Linear(_WIDTH, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
    model = nn.Sequential(*hidden, nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    batches = DataLoader(_samples(4800, 0), _BATCH_SIZE, shuffle=True)
    manager = manager_of(name)
    updates = paceline.LocalUpdates(model, optimizer, every, codec="e3m0+feedback", manager=manager)
    exchange = updates._workers.exchange

    def recorded(given: Any) -> Any:
        found = exchange(given)
        say(
            name,
            number=found.given.number,
            kept=found.given.weight if found.mean is not None else 0.0,
            workers=updates._workers.count,
            taken=found.peer_state is not None,
            repaired=len(found.repaired),
        )
        return found

    updates._workers.exchange = recorded  # type: ignore[method-assign]
    known = updates.num_exchanges
    with updates:
        while not Path("end").exists():
            for inputs, targets in batches:
                _arm(name, updates.num_exchanges)
                optimizer.zero_grad()
                mse_loss(model(inputs), targets).backward()
                time.sleep(_STEP_S)
                steps.write(b".")
                optimizer.step()
                if updates.num_exchanges != known:
                    known = updates.num_exchanges
                    say(name, number=known - 1, digest=updates._averaging.digest)
                    if Path("end").exists():
                        break
    bits = sha256(b"".join(one.detach().numpy().tobytes() for one in model.parameters()))
    say(name, bits=bits.hexdigest(), loss=_loss(model, _samples(480, 1), mse_loss))
    manager.shutdown()


def _samples(count: int, seed: int) -> TensorDataset:
    inputs = torch.randn(count, _WIDTH, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, 3 * (inputs[:, :8] * inputs[:, 8:16]).tanh() + 2)


def _arm(name: str, number: int) -> None:
    """Read and delete an order, if any; arm its fault for exchange `number`."""
    with suppress(FileNotFoundError):
        order = json.loads(Path(f"{name}.order").read_text())
        Path(f"{name}.order").unlink()
        fault = {"at": "local.exchange", "number": number, "visit": 1, **order}
        os.environ[ARMED] = json.dumps([fault])


def train_small_gpt(
    by: str, name: str, num_steps: int, every: int, seed: int, codec: str | None = None
) -> None:
    """Train a small GPT in this worker's sample order; write speed, bytes and loss."""
    task = tiny()
    torch.manual_seed(seed)
    model = task.model()
    order = torch.Generator().manual_seed(2 * seed + int(name))
    batches = iter(DataLoader(task.train, _TOKENS_BATCH_SIZE, shuffle=True, generator=order))
    optimizer = torch.optim.AdamW(model.parameters(), 0.003)
    schedule = schedule_of("cosine", num_steps // 15)(optimizer, num_steps)
    # Both workers of a ring all-reduce send as many bytes as the parameters have.
    nbytes_per_exchange: float = sum(one.nbytes for one in model.parameters())
    if by == "paceline":
        manager = manager_of(name)
        outer = {"outer_learning_rate": _OUTER_RATE, "outer_momentum": _OUTER_MOMENTUM}
        options = {"codec": codec, "manager": manager, **outer}
        loop: Any = paceline.LocalUpdates(model, optimizer, every, **options)
    else:
        loop, manager = _diloco(name, model, optimizer, every)
    with loop:
        started, num_tokens = 0.0, 0
        for step in range(num_steps):
            if step == every:  # all workers are present from the first exchange on
                started, num_tokens = time.monotonic(), 0
            inputs, targets = next(batches)
            optimizer.zero_grad()
            task.loss(model(inputs), targets).backward()
            optimizer.step()
            schedule.step()
            num_tokens += inputs.numel()
        seconds = time.monotonic() - started
    if isinstance(loop, paceline.LocalUpdates):
        nbytes_per_exchange = loop.statistics().bytes_sent / (num_steps / every)
    say(
        name,
        tokens_per_s=num_tokens / seconds,
        nbytes_per_exchange=nbytes_per_exchange,
        loss=_loss(model, task.test, task.loss),
    )
    manager.shutdown()


def _diloco(name: str, model: nn.Module, optimizer: Any, every: int) -> tuple[Any, Any]:
    rate = {"lr": _OUTER_RATE, "momentum": _OUTER_MOMENTUM, "nesterov": True}
    outer = torch.optim.SGD(model.parameters(), **rate)
    parts = {"model": model, "inner": optimizer, "outer": outer}

    def load(state: dict[str, Any]) -> None:
        for key, part in parts.items():
            part.load_state_dict(state[key])

    def state() -> dict[str, Any]:
        return {key: part.state_dict() for key, part in parts.items()}

    manager = manager_of(name, load_state_dict=load, state_dict=state)
    return DiLoCo(manager, [model], optimizer, outer, every, pin_memory=False), manager


@torch.no_grad()
def _loss(model: nn.Module, data: Any, loss: Any) -> float:
    """Return the mean loss of the first batches of the data."""
    model.eval()
    batches = zip(range(_TEST_BATCHES), DataLoader(data, _TEST_BATCH_SIZE), strict=False)
    losses = [float(loss(model(inputs), targets)) for _, (inputs, targets) in batches]
    return sum(losses) / len(losses)


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, worker, *rest = sys.argv[1:]
    if what == "faults":
        train_among_faults(worker, int(rest[0]))
    else:
        train_small_gpt(what, worker, *map(int, rest[:3]), *rest[3:])
    sys.stdout.flush()
    os._exit(0)  # threads of torchft's timers may still run
