"""What a step will hold in memory, told beforehand: the engine itself runs on tensors without data."""
