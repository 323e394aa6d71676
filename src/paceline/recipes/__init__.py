"""Recipes: what is trained, on what, with which optimizer and schedule."""
