"""From an effective batch to its summed gradient: planned micro-batches and the hot loop."""
