"""Mojumder et al., "Profiling DNN Workloads on a Volta-based DGX-1 System" (IISWC 2018)."""

from paceline.papers.dgx1.tables import paper

__all__ = ["paper"]
