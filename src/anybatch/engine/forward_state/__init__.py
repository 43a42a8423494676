"""Detects state that a forward changes, other than normalisation statistics, and updates it once per step."""
