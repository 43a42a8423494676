"""The guide: a page that explains gradient accumulation with numbers computed by PyTorch, live or in recorded runs."""
