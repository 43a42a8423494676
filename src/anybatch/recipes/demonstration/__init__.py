"""The programs of `anybatch demo`: one training loop twice, as it is usually written and with three lines changed."""
