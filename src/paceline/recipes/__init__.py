"""Recipes: what is trained, on which data, and with which loss."""
