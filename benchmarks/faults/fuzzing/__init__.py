"""Fuzz every parser with changed valid inputs, within limits of memory and time."""
