"""A run's own page: what `anybatch watch` shows, from logs that anybody may have written."""
