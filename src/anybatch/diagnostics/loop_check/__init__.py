"""Judges a training loop by running it: on a model whose gradient says which samples made it, and with what weights."""
