"""Start and connect processes, and use a machine's devices, shared memory and files."""
