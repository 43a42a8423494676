"""Runs training steps and evaluations: the hot loop, precision, clipping, updates, saving and resuming."""
