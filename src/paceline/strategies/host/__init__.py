"""Every worker has the whole model; the host sums their gradients while backward goes on."""
