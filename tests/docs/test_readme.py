"""The code in README and docs/your_loop.md runs unmodified, and links have targets."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import anybatch as ab
from anybatch.core.loss import Loss

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
YOUR_LOOP = (ROOT / "docs" / "your_loop.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README + YOUR_LOOP, re.DOTALL)
MOST_WORDS = 900


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean over samples, as the README's loss does."""
    return functional.cross_entropy(model(batch["image"]), batch["label"])


def names_for_readme_code() -> dict[str, Any]:
    """Return the names that the README's code assumes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 4))
    images = [{"image": torch.randn(4, 4), "label": torch.randint(0, 4, ())} for _ in range(300)]
    return {
        "F": functional,
        "ab": ab,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "dataset": images,
        "held_out": images[:40],
        "resuming": False,
        "loader": DataLoader(images, batch_size=64),  # type: ignore[arg-type]
        "accuracy": lambda net, batch: (net(batch["image"]).argmax(1) == batch["label"]).float(),
        "print": lambda *_: None,
    }


def returns_loss(function: Callable[..., object]) -> bool:
    """Whether a function declares a loss."""
    return get_type_hints(function)["return"] is Loss


@pytest.mark.slow
def test_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All Python blocks of README and docs/your_loop.md run in order in one session."""
    monkeypatch.chdir(tmp_path)
    names = names_for_readme_code()

    for block in PYTHON:
        exec(compile(block, "docs", "exec"), names)  # noqa: S102 (our own text)

    assert len(PYTHON) >= 3
    assert names["report"].num_samples == 300 - 256
    assert names["engine"].position.epoch == 5
    names["engine"].close()


def test_declarations_in_the_table_are_valid() -> None:
    """The table of losses has valid code for each declaration."""
    names = names_for_readme_code() | {"loss": lambda *_: None, "encode": len, "w": torch.ones(4)}
    cells = re.findall(r"\| `ab\.((\w+)\(.*?\))`", YOUR_LOOP)
    functions = inspect.getmembers(ab, inspect.isfunction)

    declared = [eval(f"ab.{cell}", names) for cell, _ in cells]  # noqa: S307 (our own text)

    assert all(callable(loss.function) for loss in declared)
    assert {name for _, name in cells} == {name for name, function in functions if returns_loss(function)}


def test_readme_is_short() -> None:
    """The README is short enough to read in about three minutes."""
    assert len(README.split()) <= MOST_WORDS


def test_three_lines_change_a_loop() -> None:
    """The new loop of the README's diff trains the same parameters as the old one."""
    old, new = names_for_readme_code(), names_for_readme_code()
    for batch in old["loader"]:
        old["optimizer"].zero_grad()
        loss(old["model"], batch).backward()
        old["optimizer"].step()

    with ab.Engine(new["model"], new["optimizer"], ab.mean_over_samples(loss), micro_batch_size=8) as engine:
        for batch in new["loader"]:
            engine.step(batch)

    for one, other in zip(old["model"].parameters(), new["model"].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


PAGES = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "AGENTS.md", "SECURITY.md"]
PAGES += ["CODE_OF_CONDUCT.md", "docs/your_loop.md", "docs/hosts.md"]


@pytest.mark.parametrize("page", PAGES)
def test_links_have_targets(page: str) -> None:
    """Every relative link of a page points to a file of the repository."""
    folder = (ROOT / page).parent
    targets = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", (ROOT / page).read_text(encoding="utf-8"))

    missing = [target for target in targets if "://" not in target and not (folder / target).exists()]

    assert not missing
