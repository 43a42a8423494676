"""Loops in plain PyTorch, each wrong in one line as it is often written, and the right one. No part of the product."""
