"""What a step will hold in memory, predicted: the engine itself runs on tensors without data."""
