"""Profile of a model's step on this machine: times, waits and memory."""
