"""Changes that would make larger micro-batches fit, or steps faster: planned and ranked."""
