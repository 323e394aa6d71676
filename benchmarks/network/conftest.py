"""Two hosts for tests of the bed itself."""

from bed import can_build, hosts

__all__ = ["can_build", "hosts"]
