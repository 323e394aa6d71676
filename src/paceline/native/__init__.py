"""The C++ part of Paceline: shared-memory sums, codecs, casts, and steps of dense networks.

`Arena` sums gradients for `links/arena.py`, and so for the exchange of strategy `host`; all other
exchanges are torch.distributed's. `codecs/` calls `Codebook`, `FourBitTable` and `cast_into`, for
tensors on the CPU.
`sum_into` is the arena's sum of two tensors, by which tests compare it with torch.
"""

from paceline.native._native import (
    Activation,
    Arena,
    Codebook,
    DenseChain,
    DType,
    Fault,
    FourBitTable,
    Goal,
    Status,
    arena_nbytes,
    cast_into,
    die_with_parent,
    instruction_sets,
    sum_into,
)

__all__ = [
    "Activation",
    "Arena",
    "Codebook",
    "DType",
    "DenseChain",
    "Fault",
    "FourBitTable",
    "Goal",
    "Status",
    "arena_nbytes",
    "cast_into",
    "die_with_parent",
    "instruction_sets",
    "sum_into",
]
