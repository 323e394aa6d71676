"""What this machine has, and what of it would make training slow."""
