"""Strategy local: inner steps, and an exchange every so many."""
