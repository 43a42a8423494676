"""Reports of an engine about its run: records for observers, and decisions."""
