"""Changes that would make larger micro-batches fit, or steps faster: planned, ranked, and combined."""
