"""Watches losses and gradient norms as they are reported, and lowers the rate or goes back where a run diverges."""
