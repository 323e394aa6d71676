"""Adapters: DataParallel and LocalUpdates in tools that wrap models and run loops themselves.

Each is imported by its own name, and needs its tool: `pip install "paceline[lightning]"` and so on.
"""
