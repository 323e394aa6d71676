"""Recipes: what is trained, by name or of the user's own; losses, optimizers, schedules."""
