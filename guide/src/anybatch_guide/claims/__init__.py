"""Claims about gradient accumulation: each has a measurement, and a rule for its verdict."""
