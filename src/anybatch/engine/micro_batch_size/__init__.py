"""The size of micro-batches: given, found by trial runs, or reduced after out of memory."""
