"""Experiments for the figures of the page: each a function, recorded or run live from the page."""
