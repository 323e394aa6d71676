"""8-bit and other small types for what travels between workers (Dettmers 2016)."""
