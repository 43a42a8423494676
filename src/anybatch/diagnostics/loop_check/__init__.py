"""Checks a training loop by running it on a model whose gradient shows the samples used and their weights."""
