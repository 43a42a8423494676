"""Observers that write the records of a run: a log with a schema, a console, TensorBoard, pictures."""
