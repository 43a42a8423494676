"""What the page shows, as functions: one file per figure, run to be recorded or run again while somebody looks."""
