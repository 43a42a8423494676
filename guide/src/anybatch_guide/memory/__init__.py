"""Memory for the guide: small models whose steps a CPU can measure, and plans as tables for the page."""
