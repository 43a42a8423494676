"""Runs effective batches under a BatchNorm policy."""
