"""Scaling studies: an epoch's time by method, workers and batch, and what follows from it."""
