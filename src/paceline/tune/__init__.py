"""Settings that are looked for while training goes on: step times in, the next setting out."""
