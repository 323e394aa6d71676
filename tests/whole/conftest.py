"""Fixtures: runs of strategy local."""

from fixtures import runs

__all__ = ["runs"]
