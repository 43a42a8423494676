"""Reports of an engine on its run: records for observers, and its decisions."""
