"""Pure facts: numbers and tensors in, numbers and tensors out."""
