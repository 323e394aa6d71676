"""The C++ part of Paceline."""

from paceline.native._native import (
    Arena,
    Codebook,
    DType,
    Fault,
    FourBitTable,
    Goal,
    Status,
    arena_nbytes,
    cast_into,
    decode_four_bit_into,
    decode_into,
    die_with_parent,
    encode_four_bit_into,
    encode_into,
    instruction_sets,
    sum_into,
)

__all__ = [
    "Arena",
    "Codebook",
    "DType",
    "Fault",
    "FourBitTable",
    "Goal",
    "Status",
    "arena_nbytes",
    "cast_into",
    "decode_four_bit_into",
    "decode_into",
    "die_with_parent",
    "encode_four_bit_into",
    "encode_into",
    "instruction_sets",
    "sum_into",
]
