"""Ways of using devices, side by side on one job: time, memory, traffic, equality of gradients."""
