"""What a training step holds in memory: booked as it happens, on real tensors and on tensors without data."""
