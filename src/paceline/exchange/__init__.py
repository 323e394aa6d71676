"""Average gradients or parameters over the ranks that train replicas of a model."""
