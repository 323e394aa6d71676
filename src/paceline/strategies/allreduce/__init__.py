"""Every worker has the whole model; gradients are averaged by an all-reduce."""
