"""Scaling studies: epoch times by method, workers and batch, with advice."""
