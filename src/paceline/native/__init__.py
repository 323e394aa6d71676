"""The C++ part of Paceline."""

from paceline.native._native import die_with_parent, instruction_sets

__all__ = ["die_with_parent", "instruction_sets"]
