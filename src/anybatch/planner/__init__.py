"""Predicts the memory and time of a step before it runs: the engine itself runs on tensors without data."""
