"""Memory for the guide: small models that a CPU can measure, and plans of large models as tables for the page."""
