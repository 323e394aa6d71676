"""Where a model's step goes on this machine: times, waits and memory, measured and laid out."""
