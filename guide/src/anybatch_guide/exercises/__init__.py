"""Loops with a bug to find, in the style of published ones, with solutions. Not for use in training."""
