"""The size of micro-batches: given, found by trial runs, or reduced after an out-of-memory error."""
