"""The C++ part of Paceline: shared-memory sums, codecs, casts, and steps of dense networks.

With strategy `host`, `links/arena.py` sums gradients in shared memory (`Arena`); torch.distributed
does all other exchanges. `codecs/` uses `Codebook`, `FourBitTable` and `cast_into` for CPU tensors.
`sum_into` sums tensors with the arena's code, so that tests can compare this code with torch.
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
    "instruction_sets",
    "sum_into",
]
