"""The tasks of the playground: four small tasks whose data is generated offline, and is the same everywhere."""
