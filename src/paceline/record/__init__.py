"""Recordings: spans of a running model, merged over its ranks, and written as traces."""
