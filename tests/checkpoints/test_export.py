"""Plain torch and other libraries load an export, with the weights under the model's names."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.checkpoints import export, save
from anybatch.errors import CheckpointError, MissingCheckpointError, UserError


class Tied(nn.Module):
    """A model with a tied embedding and output layer, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return scores of the next token."""
        scores: torch.Tensor = self.head(self.norm(self.embed(tokens)))
        return scores


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def trained(folder: Path, **options: Any) -> tuple[Tied, ab.Engine]:
    """Return a model after two steps and a save."""
    torch.manual_seed(0)
    model = Tied()
    batch = {"x": torch.arange(5).repeat(3), "y": torch.arange(15) % 5}
    with ab.Engine(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5),
        ab.mean_over_samples(loss),
        norms="keep",
        micro_batch_size=15,
        average_decay=0.5,
    ) as engine:
        engine.step(batch)
        engine.step(batch)
        engine.save(folder, **options)
    return model, engine


@pytest.mark.parametrize("options", [{}, {"sharded": True}])
def test_plain_torch_loads_it(options: dict[str, Any], tmp_path: Path) -> None:
    """`load_state_dict` and `safetensors.torch.load_model` load an export, which has tied weights once."""
    model, engine = trained(tmp_path / "run", **options)
    file = export(tmp_path / "run", tmp_path / "model.safetensors")
    averaged = load_file(export(tmp_path / "run", tmp_path / "averaged.safetensors", averaged=True))
    loaded, other = Tied(), Tied()
    missing = loaded.load_state_dict(load_file(file), strict=False)
    load_model(other, file)

    assert missing.missing_keys == ["head.weight"]
    assert not missing.unexpected_keys
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
        assert torch.equal(other.state_dict()[name], value), name
    assert engine.average is not None
    for name, value in engine.average.weights.items():
        assert torch.equal(averaged[name], value)
        assert not torch.equal(averaged[name], model.state_dict()[name])
    assert torch.equal(averaged["norm.running_mean"], model.norm.running_mean)  # type: ignore[arg-type]


def test_invalid_exports_are_refused(tmp_path: Path) -> None:
    """An existing file, a folder without checkpoints, another kind or missing averages raise, and write nothing."""
    trained(tmp_path / "run")
    (tmp_path / "there").touch()
    save(tmp_path / "other", 0, {"a": torch.ones(2)})
    empty: dict[str, Any] = {"model": {"a": torch.ones(2)}, "average": None}
    save(tmp_path / "plain", 0, empty)
    save(tmp_path / "odd", 0, {"model": {"a": torch.ones(2, dtype=torch.complex128)}, "average": None})
    new = tmp_path / "new"

    for error, source, file, averaged in (
        (UserError, "run", tmp_path / "there", False),
        (MissingCheckpointError, "nowhere", new, False),
        (CheckpointError, "other", new, False),
        (CheckpointError, "plain", new, True),
        (UserError, "odd", new, False),
    ):
        with pytest.raises(error):
            export(tmp_path / source, file, averaged=averaged)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["odd", "other", "plain", "run", "there"]
