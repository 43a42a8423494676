"""Where the records of a run go: a log with a schema, a console, TensorBoard, pictures."""
