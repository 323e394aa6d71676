"""Adapters for DataParallel and LocalUpdates in Lightning, Fabric, Accelerate and Transformers.

Import each adapter as a module, such as `paceline.integrations.lightning`. An adapter requires its
tool: `pip install "paceline[lightning]"`.
"""
