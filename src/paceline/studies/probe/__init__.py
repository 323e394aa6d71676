"""Measure this machine, and write a machine file."""
