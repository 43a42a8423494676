"""The programs of `anybatch demo`: a usual training loop, and the same loop with three changed lines."""
