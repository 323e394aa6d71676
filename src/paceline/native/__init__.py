"""The C++ part of Paceline."""

from paceline.native._native import (
    Arena,
    Codebook,
    DType,
    Fault,
    Goal,
    Status,
    arena_nbytes,
    decode_into,
    die_with_parent,
    encode_into,
    instruction_sets,
    sum_into,
)

__all__ = [
    "Arena",
    "Codebook",
    "DType",
    "Fault",
    "Goal",
    "Status",
    "arena_nbytes",
    "decode_into",
    "die_with_parent",
    "encode_into",
    "instruction_sets",
    "sum_into",
]
