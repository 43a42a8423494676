"""One file per way of using devices, one contract: strategies sum, and never divide."""
