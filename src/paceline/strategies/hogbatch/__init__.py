"""Workers of any speed train on one shared model, each on batches of its own size."""
