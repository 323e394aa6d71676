"""Rehearsals: real processes and a real exchange, but layers that take a given time."""
