"""Fixtures: hubs and workers as processes, a network between them, and runs of strategy local."""

from fixtures import hub, proxy, runs, worker

__all__ = ["hub", "proxy", "runs", "worker"]
