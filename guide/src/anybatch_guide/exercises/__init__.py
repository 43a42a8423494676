"""Loops with a bug to find, in the style of published ones, and what is wrong with each. No part of the product."""
