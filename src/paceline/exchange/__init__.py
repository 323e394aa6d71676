"""From gradients that become ready during backward to their mean over all ranks."""
