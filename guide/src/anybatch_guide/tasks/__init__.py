"""The four small tasks of the playground; their data is generated offline, and is equal on every machine."""
