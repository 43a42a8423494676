"""Memory for the guide: small models whose steps a CPU can measure, and plans as numbers that a page can take along."""
