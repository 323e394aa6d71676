"""Adapters for DataParallel and LocalUpdates in Lightning, Fabric, Accelerate and Transformers.

Import each adapter by name; each requires its tool, as in `pip install "paceline[lightning]"`.
"""
