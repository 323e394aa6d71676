"""Workloads, machines, plans and timelines: pure Python, without torch and without I/O."""
