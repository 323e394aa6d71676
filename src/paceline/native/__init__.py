"""The C++ part of Paceline."""

from paceline.native._native import (
    Arena,
    DType,
    Fault,
    Goal,
    Status,
    arena_nbytes,
    die_with_parent,
    instruction_sets,
    sum_into,
)

__all__ = [
    "Arena",
    "DType",
    "Fault",
    "Goal",
    "Status",
    "arena_nbytes",
    "die_with_parent",
    "instruction_sets",
    "sum_into",
]
