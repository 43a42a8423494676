"""Where the memory of a recorded step went, as text and as a picture."""
