"""Experiments for the figures of the page; each is a function that is recorded, or run live from the page."""
