"""From an effective batch to its summed gradient: micro-batches, the hot loop, two passes for some losses."""
