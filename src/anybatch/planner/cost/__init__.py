"""What a traced step costs on a device: its allocator, the time of its operations."""
