import enum
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

def die_with_parent(parent_pid: int) -> None: ...
def instruction_sets() -> list[str]: ...

class DType(enum.Enum):
    FLOAT32 = 0
    FLOAT64 = 1
    BFLOAT16 = 2
    FLOAT16 = 3

def sum_into(
    result: Tensor,
    sources: Sequence[Tensor],
    scale: float = 1.0,
    instruction_set: str = "fastest",
    streaming: bool = False,
) -> None: ...

class Goal(enum.Enum):
    CHUNK = 0
    STEP = 1
    DRAINED = 2

class Status(enum.Enum):
    REACHED = 0
    PENDING = 1
    DISCARDED = 2
    LOST = 3

class Fault(enum.Enum):
    DIED = 1
    POST = 2
    COMMIT = 3
    SUM = 4
    PUBLISH = 5
    DRAIN = 6

def arena_nbytes(num_ranks: int, slot_nbytes: int, max_chunks: int, num_flags: int) -> int: ...

class Arena:
    def __init__(
        self,
        fd: int,
        rank: int,
        num_ranks: int,
        slot_nbytes: int,
        max_chunks: int,
        num_flags: int,
        scale: float,
        held: bool,
        own_core: bool,
        spare_core: bool,
        with_thread: bool,
    ) -> None: ...
    def slot(self, rank: int, /) -> NDArray[np.uint8]: ...
    def shared_result(self, parity: int, /) -> NDArray[np.uint8]: ...
    def result(self, parity: int, /) -> NDArray[np.uint8]: ...
    def flags(self) -> NDArray[np.uint8]: ...
    def refresh(self, parity: int, /) -> int: ...
    def copy_in(self, rank: int, sources: Sequence[tuple[int, int, int]], /) -> None: ...
    def copy_out(self, parity: int, offset: int, address: int, nbytes: int, /) -> None: ...
    def set_chunks(self, chunks: Sequence[Sequence[tuple[int, int, DType]]], /) -> None: ...
    def begin(self, step: int, /) -> None: ...
    def post(self, chunk: int, /) -> None: ...
    def publish(self) -> None: ...
    def commit(self) -> None: ...
    def wait(self, goal: Goal, step: int, chunk: int, /) -> Status: ...
    def discard(self) -> None: ...
    def drain(self) -> None: ...
    def is_discarded(self, step: int, /) -> bool: ...
    def discarded_by(self) -> int: ...
    def missing(self, goal: Goal, step: int, chunk: int, /) -> list[tuple[int, Fault]]: ...
    def give_up(self, rank: int, fault: Fault, /) -> None: ...
    def lost(self) -> list[tuple[int, Fault]]: ...
    def times(self, chunk: int, /) -> tuple[int, int]: ...

class Codebook:
    def __init__(self, magnitudes: Sequence[float], thresholds: Sequence[float]) -> None: ...
    def encode_into(
        self,
        codes: Tensor,
        scales: Tensor,
        values: Tensor,
        block_size: int,
        finds_scales: bool,
        num_threads: int,
        instruction_set: str = "fastest",
    ) -> int: ...
    def decode_into(
        self,
        values: Tensor,
        codes: Tensor,
        scales: Tensor,
        block_size: int,
        adds: bool,
        num_threads: int,
        instruction_set: str = "fastest",
    ) -> None: ...

class FourBitTable:
    def __init__(self, magnitudes: Sequence[float], thresholds: Sequence[float]) -> None: ...
    def encode_into(
        self,
        codes: Tensor,
        scales: Tensor,
        values: Tensor,
        block_size: int,
        finds_scales: bool,
        num_threads: int,
        instruction_set: str = "fastest",
    ) -> int: ...
    def decode_into(
        self,
        values: Tensor,
        codes: Tensor,
        scales: Tensor,
        block_size: int,
        adds: bool,
        num_threads: int,
        instruction_set: str = "fastest",
    ) -> None: ...

def cast_into(
    rounded: Tensor,
    values: Tensor,
    dtype: DType,
    num_threads: int,
    instruction_set: str = "fastest",
) -> int: ...

class Activation(enum.Enum):
    NONE = 0
    RELU = 1
    SIGMOID = 2

class DenseChain:
    def __init__(
        self,
        layers: Sequence[tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Activation]],
        inputs: Tensor,
        classes: Tensor,
    ) -> None: ...
    def forward(self, rows: Tensor) -> float: ...
    def backward(self) -> None: ...
    def step(self, rate: float, momentum: float) -> None: ...
