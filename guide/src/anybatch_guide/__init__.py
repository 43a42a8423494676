"""The guide: a page that explains the batch, whose every number was computed by PyTorch, now or in a recorded run."""
