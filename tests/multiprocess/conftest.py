"""Fixtures: a network that can be cut, and runs of strategy local."""

from fixtures import proxy, runs

__all__ = ["proxy", "runs"]
