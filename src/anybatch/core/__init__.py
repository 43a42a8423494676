"""Pure facts: numbers and tensors in, numbers and tensors out. Reads like a textbook, in chapter order."""
