"""What would make more fit, or the same faster: changes of a run, planned and ranked."""
