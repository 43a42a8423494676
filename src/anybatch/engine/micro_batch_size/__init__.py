"""How large micro-batches are: named, found by trial runs, halved after out of memory."""
