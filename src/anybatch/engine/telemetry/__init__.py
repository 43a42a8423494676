"""What an engine says of its run: records for observers, and what it decided."""
