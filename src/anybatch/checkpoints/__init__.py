"""A run's state on disk: saved completely or not at all, without code, and checked byte by byte when loaded."""

from anybatch.checkpoints.files import list_checkpoints, step_of
from anybatch.checkpoints.loading import LoadedCheckpoint, SkippedCheckpoint, export, load, load_latest
from anybatch.checkpoints.saving import SavedCheckpoint, save

__all__ = [
    "LoadedCheckpoint",
    "SavedCheckpoint",
    "SkippedCheckpoint",
    "export",
    "list_checkpoints",
    "load",
    "load_latest",
    "save",
    "step_of",
]
