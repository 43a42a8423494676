"""Which effective batch size is worth it here? The gradient's noise and the seconds of a step, put together."""
