"""What a parser is to the fuzzer: its seeds, how they are changed, and how an input is parsed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from fuzzing.mutations import Mutation, mutated


@dataclass(frozen=True)
class Parser:
    """A parser of files, or of frames and records in memory.

    `seeds` returns valid inputs, made in a folder by the real writers. `parse` takes an input and a
    folder to write it in; it returns a validated object, or raises one of the project's errors.
    `weight` is its part of the files, or of the frames.
    """

    name: str
    is_frame: bool
    weight: float
    seeds: Callable[[Path], list[bytes]]
    mutations: tuple[Mutation, ...]
    parse: Callable[[bytes, Path], object]

    def input(self, seeds: list[bytes], seed: int, number: int) -> bytes:
        """Return the input of a number: the seeds themselves, and then changed ones."""
        if number < len(seeds):
            return seeds[number]
        random = Random(f"{self.name} {seed} {number}")  # noqa: S311 - the same again
        return mutated(random, random.choice(seeds), self.mutations)
