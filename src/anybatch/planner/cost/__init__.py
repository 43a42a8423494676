"""Costs of a traced step on a device: memory of its allocator, time of its operations."""
