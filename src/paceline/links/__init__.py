"""Start and connect processes: workers, process groups, shared memory, devices and files."""
