"""Steps of ranks that sum their gradients in an arena."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.links.arena import Arena
from paceline.links.group import Group


class Segment(NamedTuple):
    offset: int
    count: int
    dtype: torch.dtype


# Segments have odd lengths and gaps between them; one needs many blocks.
SEGMENTS = [
    Segment(0, 7, torch.float32),
    Segment(64, 200_001, torch.float32),
    Segment(800_128, 33, torch.float64),
    Segment(800_392, 1001, torch.bfloat16),
    Segment(802_394, 5, torch.float16),
    Segment(802_432, 90_000, torch.float16),
    Segment(982_432, 3, torch.float32),
]
NBYTES = 982_448
CHUNKS = [[0, 1], [2, 3, 4], [], [5], [6]]


def opened(group: Group, deadline_s: float = 30, **options: object) -> Arena:
    arena = Arena(group, NBYTES, 8, 3, deadline_s, **options)
    arena.set_chunks([[SEGMENTS[i] for i in chunk] for chunk in CHUNKS])
    return arena


def part(memory: Tensor, segment: Segment) -> Tensor:
    nbytes = segment.count * segment.dtype.itemsize
    return memory[segment.offset : segment.offset + nbytes].view(segment.dtype)


def gradient(rank: int, step: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank * 10_000 + step * 10 + index)
    return torch.randn(SEGMENTS[index].count, generator=generator).to(SEGMENTS[index].dtype)


def mean(world_size: int, step: int, index: int) -> Tensor:
    dtype = SEGMENTS[index].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = functools.reduce(
        torch.add, [gradient(rank, step, index).to(wide) for rank in range(world_size)]
    )
    return (total * torch.tensor(1 / world_size, dtype=wide)).to(dtype)


def deliver(arena: Arena, rank: int, step: int, chunk: int) -> None:
    for index in CHUNKS[chunk]:
        arena.copy_in([(SEGMENTS[index].offset, gradient(rank, step, index))])
    arena.post(chunk)


def deliver_all(arena: Arena, rank: int, step: int) -> None:
    for chunk in range(len(CHUNKS)):
        deliver(arena, rank, step, chunk)
    arena.commit()


def take_step(arena: Arena, rank: int, step: int) -> None:
    arena.begin(step)
    deliver_all(arena, rank, step)
    arena.wait_step()


def check(arena: Arena, world_size: int, step: int, factor: int = 1) -> None:
    for index, segment in enumerate(SEGMENTS):
        wanted = mean(world_size, step, index) * factor
        assert torch.equal(part(arena.shared_result(step), segment), wanted), (step, index)
        target = torch.empty(segment.count, dtype=segment.dtype)
        arena.copy_out(step, segment.offset, target)
        assert torch.equal(target, wanted), (step, index)
