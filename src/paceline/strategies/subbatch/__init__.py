"""The body of a model is data-parallel, its head split by outputs and passed in sub-batches."""
