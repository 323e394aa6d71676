"""Profile a training step on this machine: times, waits and memory."""
