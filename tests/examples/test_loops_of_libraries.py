"""The examples with loops of timm and open_clip: training in micro-batches equals training in whole batches."""

import runpy

import pytest
import torch

from tests.architecture.source_tree import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of the libraries
BOUND = 1e-12


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_timm(name: str) -> None:
    """A model with and one without BatchNorm end with the parameters and statistics of whole batches."""
    pytest.importorskip("timm")
    assert runpy.run_path(str(ROOT / "examples" / "timm_loop.py"))["run"](name, torch.float64) < BOUND


def test_open_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    """The similarities of all samples of an effective batch are in one loss."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # which open_clip would set
    pytest.importorskip("open_clip")
    assert runpy.run_path(str(ROOT / "examples" / "open_clip_loop.py"))["run"](torch.float64) < BOUND
