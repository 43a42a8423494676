"""Experiments for the figures of the page: one file and function each, recorded or run live from the page."""
