"""What was measured on this machine before, kept in files for the next plan."""
