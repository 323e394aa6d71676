"""Between processes: starting workers, process groups, and what flows between them."""
