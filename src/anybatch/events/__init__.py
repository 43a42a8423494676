"""What was seen of a run, written down: the schema of a line, and the log that writes and reads lines."""
