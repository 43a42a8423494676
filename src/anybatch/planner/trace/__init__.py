"""Runs a step of the engine on tensors without data, and books what it would hold."""
