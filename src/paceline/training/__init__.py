"""The training step, the loop around it, and the profile of it: the same step in all three."""
