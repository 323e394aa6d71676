"""Adapters: DataParallel in place of DistributedDataParallel in tools that wrap models themselves.

Each is imported by its own name, and needs its tool: `pip install "paceline[lightning]"` and so on.
"""
