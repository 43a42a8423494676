"""Runs plans: the hot loop, precision, clipping, evaluation. Knows nothing of files and terminals."""
