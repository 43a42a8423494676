"""Memory of a training step: recorded as it happens, on real tensors and on tensors without data."""
