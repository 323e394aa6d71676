"""Files from outside: how large each kind may be, and how it is read."""
