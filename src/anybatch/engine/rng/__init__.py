"""Random numbers of micro-batches: keyed per micro-batch or per sample, or the caller's."""
