"""Scaling studies: epoch times by strategy, number of workers and batch size, with advice."""
