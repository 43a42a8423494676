"""Where micro-batches take their random numbers from."""
