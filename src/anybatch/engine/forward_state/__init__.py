"""State that a forward changes, other than the statistics of normalisation layers: found, and updated once per step."""
