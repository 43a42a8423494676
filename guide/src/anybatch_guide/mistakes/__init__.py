"""Loops in plain PyTorch, each with one common wrong line, and the correct loop. Not for use in training."""
