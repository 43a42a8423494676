"""Runs a step of the engine on tensors without data, and records the memory it would take."""
