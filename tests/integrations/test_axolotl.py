"""The plugin for Axolotl, called as Axolotl does, by a stand-in with the methods of its `BasePlugin`."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from anybatch.errors import UserError
from tests.integrations.heads import HEADS
from tests.integrations.trainer_runs import Run
from tests.raising import raises

pytest.importorskip("accelerate", reason="needs the extra anybatch[transformers]")
pydantic = pytest.importorskip("pydantic")

NAME = "anybatch.integrations.axolotl.ExactPlugin"
HOOKS = (
    *("register", "get_training_args", "get_training_args_mixin", "load_datasets", "pre_model_load"),
    *("post_model_build", "pre_lora_load", "post_lora_load", "post_model_load", "get_trainer_cls"),
    *("create_optimizer", "create_lr_scheduler", "post_train", "post_train_unload", "get_input_args"),
    *("get_collator_cls_and_kwargs", "post_trainer_create", "add_callbacks_pre_trainer", "add_callbacks_post_trainer"),
)


class Config(dict[str, Any]):
    """A configuration, whose missing keys are None, as in Axolotl."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Load the plugin by its name, as Axolotl does."""
    base = type("BasePlugin", (), dict.fromkeys(HOOKS, lambda *_: None))
    for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["axolotl.integrations.base"].BasePlugin = base  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    module, _, kind = NAME.rpartition(".")
    yield getattr(importlib.import_module(module), kind)()
    del sys.modules[module]


def validated(plugin: Any, given: dict[str, Any]) -> Config:
    """Return a configuration with the keys that Axolotl's schema and the plugin's class have."""
    module, _, kind = plugin.get_input_args().rpartition(".")
    schema = type("Schema", (pydantic.create_model("Base"), getattr(importlib.import_module(module), kind)), {})
    return Config(schema(**given).model_dump(exclude_none=True))


@pytest.mark.parametrize("size", [None, 13])
def test_steps_are_exact(size: int | None, plugin: Any, tmp_path: Path) -> None:
    """The plugin makes the trainer exact, with and without an effective batch size."""
    run = Run(HEADS["BERT, classes"], tmp_path)
    plugin.post_trainer_create(validated(plugin, {} if size is None else {"effective_batch_size": size}), run.trainer)
    run.trainer.train()

    assert run.worst_error(windows=run.effective_batches(size) if size else None) < 1e-12
    with raises(UserError, "already_exact"):
        plugin.post_trainer_create(Config(), run.trainer)


def test_wrong_sizes(plugin: Any) -> None:
    """The schema refuses a size that is not a number."""
    with pytest.raises(pydantic.ValidationError):
        validated(plugin, {"effective_batch_size": "many"})
