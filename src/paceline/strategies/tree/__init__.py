"""Gradients go up a tree to worker 0, which updates the weights and sends them back down."""
