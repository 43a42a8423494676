"""The transcript in AGENTS.md: from a script that runs out of memory to an exact run, by commands and their JSON."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from anybatch.cli.main import main
from tests.architecture.source_tree import ROOT

SCRIPT = """
import torch
from torch import nn

import anybatch as ab
from anybatch.testing import memory_budget


def loss(model, batch):
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def train(model, loader, optimizer, accumulation_steps=4):  # an attempt to save memory
    for number, batch in enumerate(loader):
        loss(model, batch).backward()
        if (number + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()


def build():
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def data():
    inputs = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(inputs, inputs[:, :10].argmax(1))


def job():
    return ab.Job(
        model=build,
        optimizer=torch.optim.AdamW,
        loss=ab.mean_over_samples(loss),
        dataset=data,
        defaults=ab.RunConfig(effective_batch_size=4096, learning_rate=1e-3, epochs=3),
    )


if __name__ == "__main__":
    model = build()
    with memory_budget(12 * 2**20, model):
        loss(model, data()[:]).backward()
"""
STEP = re.compile(r"^\$ anybatch ([^#\n]+?) +# status (\d+)(?:, (\S+) = (\S+))?$", re.MULTILINE)


def field(values: object, path: str) -> object:
    """Return a value in nested objects and lists, such as `findings.0.code`."""
    for key in path.split("."):
        values = values[int(key)] if isinstance(values, list) else values[key]  # type: ignore[index]
    return values


@pytest.mark.slow
@pytest.mark.ranks
def test_the_transcript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The script runs out of memory, and each command has the status and the value that the page shows."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT, encoding="utf-8")
    failed = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, check=False)
    assert "OutOfMemoryError" in failed.stderr

    steps = STEP.findall((ROOT / "AGENTS.md").read_text(encoding="utf-8"))
    assert [words.split()[0] for words, *_ in steps] == ["check", "plan", "memory", "check", "train"]
    for words, status, path, value in steps:
        assert main(words.split()) == int(status), words
        values = json.loads(capsys.readouterr().out)
        assert values["status"] == int(status)
        assert str(field(values, path)) == value, words
