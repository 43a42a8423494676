"""Pure functions and values: numbers and tensors in, numbers and tensors out."""
