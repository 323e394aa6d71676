"""A fuzzer of every parser: inputs of the real writers, changed, in limits of memory and time."""
