"""Detects spikes of losses and gradient norms, and warns, lowers the learning rate or rolls back."""
