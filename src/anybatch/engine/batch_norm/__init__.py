"""Runs effective batches under a policy about BatchNorm."""
