"""Experiments behind the page's figures: one file and function each, run to be recorded, or live from the page."""
