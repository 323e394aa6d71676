"""Exchange gradients and parameters between replicas."""
