"""What is said of gradient accumulation, and what was measured: each claim with a rule that gives its verdict."""
