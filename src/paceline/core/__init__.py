"""Workloads, machines, plans and timelines, in pure Python without torch or I/O."""
