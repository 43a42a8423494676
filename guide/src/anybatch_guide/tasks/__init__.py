"""The tasks of the playground: four small tasks whose data are made by code, offline, and the same everywhere."""
