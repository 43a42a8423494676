"""Measurements of this machine, kept in files for the next plan."""
