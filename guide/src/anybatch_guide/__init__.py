"""The guide: a page that explains gradient accumulation with numbers from PyTorch, computed live or recorded."""
