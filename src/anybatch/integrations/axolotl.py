"""A plugin for Axolotl, named in its YAML: `plugins: [anybatch.integrations.axolotl.ExactPlugin]`."""

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from anybatch.integrations import exact


class ExactArgs(BaseModel):
    """The plugin's keys of a configuration."""

    effective_batch_size: int | None = None


class ExactPlugin(BasePlugin):  # type: ignore[misc]
    """Makes each optimizer step of Axolotl's trainer exact."""

    def get_input_args(self) -> str:
        """Return the name of the class with the plugin's keys, which Axolotl adds to its schema."""
        return f"{__name__}.{ExactArgs.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Replace the methods of the trainer."""
        exact(trainer, effective_batch_size=cfg.effective_batch_size)
