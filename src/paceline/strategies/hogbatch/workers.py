"""What `--workers` of an uneven run says: a number, or a list such as cpu:1,cpu:1@slow=16,gpu:0."""

import re
from collections import Counter
from dataclasses import dataclass
from math import inf
from typing import Literal

from paceline.core.errors import InvalidInput

FORM = "cpu:THREADS, cpu:THREADS@slow=FACTOR or gpu:INDEX"
MOST_WORKERS = 256
_MOST_THREADS = 4096
_ITEM = re.compile(r"(cpu|gpu):([0-9]{1,9})(?:@slow=([0-9]{1,9}(?:\.[0-9]{1,9})?))?")
_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A process that trains: on so many threads of a CPU, or on the GPU of an index.

    With `slow` above 1 it stands for a device that is so many times slower: the arithmetic is real,
    and then the worker waits. A GPU has one thread, and an index of a CPU is 0.
    """

    kind: Literal["cpu", "gpu"]
    threads: int = 1
    index: int = 0
    slow: float = 1.0

    def __str__(self) -> str:
        if self.kind == "gpu":
            return f"gpu:{self.index}"
        return f"cpu:{self.threads}" + (
            f"@slow={self.slow:.9f}".rstrip("0").rstrip(".") if self.slow > 1 else ""
        )

    def name(self, number: int) -> str:
        """Return what the device of worker `number` is called in plans and results."""
        return f"{self.kind}{number}"


def parse_workers(text: str, num_cores: int) -> tuple[WorkerSpec, ...]:
    """Return the workers that the text asks for, in its order.

    A number asks for as many workers on CPUs, which share the cores evenly. InvalidInput names the
    item that is none, and what would be right.
    """
    stripped = text.strip()
    if _NUMBER.fullmatch(stripped):
        return _even(int(stripped), num_cores)
    items = [item.strip() for item in text.split(",")]
    _check_number(len(items))
    specs = tuple(_parsed(item, number) for number, item in enumerate(items))
    gpus = Counter(spec.index for spec in specs if spec.kind == "gpu")
    twice = [index for index, times in gpus.items() if times > 1]
    if twice:
        raise InvalidInput(f"workers: gpu:{twice[0]} stands twice; a GPU is one worker")
    return specs


def _even(number: int, num_cores: int) -> tuple[WorkerSpec, ...]:
    _check_number(number)
    return (WorkerSpec("cpu", max(1, num_cores // number)),) * number


def _check_number(number: int) -> None:
    if not 1 <= number <= MOST_WORKERS:
        raise InvalidInput(f"workers: from 1 to {MOST_WORKERS} can train one model, not {number}")


def _parsed(item: str, number: int) -> WorkerSpec:
    match = _ITEM.fullmatch(item)
    if match is None:
        raise InvalidInput(
            f"workers: {item!r} (worker {number}) is not of the form {FORM}; "
            "or write a number of workers"
        )
    kind, count, slow = match[1], int(match[2]), match[3]
    if kind == "gpu":
        if slow is not None:
            raise InvalidInput(f"workers: {item!r}: only a worker on a CPU can be slowed down")
        return WorkerSpec("gpu", index=count)
    if not 1 <= count <= _MOST_THREADS:
        raise InvalidInput(f"workers: {item!r}: has from 1 to {_MOST_THREADS} threads")
    factor = 1.0 if slow is None else float(slow)
    if not 1 <= factor < inf:
        raise InvalidInput(f"workers: {item!r}: a worker can be slowed down only from 1 up")
    return WorkerSpec("cpu", threads=count, slow=factor)
