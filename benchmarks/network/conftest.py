"""Provide the fixtures of `bed` to the tests of the test bed itself."""

from bed import can_build, hosts

__all__ = ["can_build", "hosts"]
