"""The C++ part of Paceline: shared-memory sums, codecs, casts, and steps of dense networks.

`links/arena.py` sums gradients with `Arena` when strategy `host` exchanges; torch.distributed does
all other exchanges. `codecs/` uses `Codebook`, `FourBitTable` and `cast_into` for CPU tensors.
`sum_into` sums two tensors like `Arena`, so that tests can compare the arena's sums with torch.
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
