"""Record the memory of a training step, with real tensors or with fake tensors that have no data."""
