"""Runs a recipe: settings, folder, session, stop."""
