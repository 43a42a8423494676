"""Claims about gradient accumulation, measured: each with a rule that gives its verdict."""
