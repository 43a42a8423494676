"""The recipe "text": its model against plain formulas, its data, and that it learns."""

import cmath
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from anybatch.core.run_config import RunConfig
from anybatch.errors import DataError
from anybatch.recipes.start import start
from anybatch.recipes.text import (
    Block,
    Transformer,
    Windows,
    list_files,
    rotate,
    text,
)
from tests.raising import raises

SENTENCE = b"the quick brown fox jumps over the lazy dog. "


def filled(folder: Path, num_files: int = 4, num_bytes: int = 2000) -> Path:
    """Write files of repeated text, each with a distinct number, and return their folder."""
    for number in range(num_files):
        line = b"%d " % number + SENTENCE
        (folder / f"{number}.txt").write_bytes((line * (1 + num_bytes // len(line)))[:num_bytes])
    return folder


def test_packed_samples_are_independent() -> None:
    """Samples packed into one row have the same logits and gradients as separate samples, in float64."""
    model = Transformer(width=16, num_layers=2, num_heads=2).double()
    samples = [torch.randint(0, 256, (1, length)) for length in (5, 1, 9, 5)]
    alone = torch.cat([model(sample) for sample in samples], dim=1)
    expected = torch.autograd.grad(alone.square().sum(), list(model.parameters()))

    together = model(torch.cat(samples, dim=1), [sample.shape[1] for sample in samples])

    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)
    found = torch.autograd.grad(together.square().sum(), list(model.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_rotation_matches_the_plain_formula() -> None:
    """As complex numbers, pair i at time t is multiplied by exp(i t 10000 ** (-2 i / head_width))."""
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    turned = rotate(x)
    for head in range(2):
        for time in range(5):
            for pair in range(3):
                vector = complex(x[head, time, pair], x[head, time, pair + 3])
                expected = vector * cmath.exp(1j * time * 10_000 ** (-2 * pair / 6))
                found = complex(turned[head, time, pair], turned[head, time, pair + 3])
                assert found == pytest.approx(expected, abs=1e-6)


def test_a_block_matches_the_plain_formula() -> None:
    """A block matches softmax attention with a causal mask and SwiGLU, both on normalized inputs, written out."""
    block, x = Block(8, 2).double(), torch.randn(3, 5, 8, dtype=torch.float64)

    def normed(x: Tensor) -> Tensor:
        return x / (x.square().mean(dim=-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()

    query, key, value = (normed(x) @ block.split.weight.T).split(8, dim=-1)
    heads = []
    for channels in (slice(0, 4), slice(4, 8)):
        scores = rotate(query[..., channels]) @ rotate(key[..., channels]).transpose(1, 2) / math.sqrt(4)
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(dim=-1) @ value[..., channels])
    attended = x + torch.cat(heads, dim=-1) @ block.merge.weight.T
    gate, signal = (normed(attended) @ block.up.weight.T).split(21, dim=-1)
    expected = attended + (gate * gate.sigmoid() * signal) @ block.down.weight.T
    torch.testing.assert_close(block(x), expected, rtol=0, atol=1e-10)


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4), context=st.integers(1, 8))
@pytest.mark.slow
def test_windows_contain_the_text(sizes: list[int], context: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The joined inputs are the files with a zero byte after each; targets are shifted by one byte."""
    folder = tmp_path_factory.mktemp("text")
    contents = [bytes(range(1, size + 1)) for size in sizes]
    files = [folder / f"{number}" for number in range(len(sizes))]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    joined = b"".join(content + b"\0" for content in contents)
    if len(joined) <= context:
        with raises(DataError, "too_little_text"):
            Windows(files, context)
        return
    windows = Windows(files, context)
    samples = [windows[index] for index in range(len(windows))]
    num_targets = len(windows) * context
    assert len(joined) - 1 - context < num_targets <= len(joined) - 1
    assert bytes(torch.cat([sample["inputs"] for sample in samples]).tolist()) == joined[:num_targets]
    assert bytes(torch.cat([sample["targets"] for sample in samples]).tolist()) == joined[1 : num_targets + 1]


def test_which_files_are_read(tmp_path: Path) -> None:
    """Matching files at any depth are read, without hidden ones, until there are enough bytes."""
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    for name in ("a.txt", "deep/er/b.txt", "deep/c.md", ".hidden/d.txt", "deep/.e.txt"):
        (tmp_path / name).write_bytes(b"12345")

    def names(pattern: str | None, max_bytes: int | None = None) -> set[str]:
        return {file.name for file in list_files(tmp_path, pattern, max_bytes)}

    assert names(None) == {"a.txt", "b.txt", "c.md"}
    assert names("*.txt") == {"a.txt", "b.txt"}
    assert len(names(None, 10)) == 2
    assert len(names(None, 11)) == 3


def test_too_few_files(tmp_path: Path) -> None:
    """A single file, and a missing folder, raise: training and evaluation need separate files."""
    (tmp_path / "a.txt").write_bytes(b"12345")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere.txt")
    with raises(DataError, "too_few_files"):
        text(tmp_path, pattern="*.txt")
    with raises(DataError, "too_few_files"):
        text(tmp_path / "nowhere")


def test_held_out_files_are_not_trained_on(tmp_path: Path) -> None:
    """Every file is used either for training or for evaluation, in every run."""

    def files_of(make: Callable[[], Windows]) -> set[bytes]:
        return {part.split(b" ")[0] for part in bytes(make().bytes.tolist()).split(b"\0") if part}

    job = text(filled(tmp_path, num_files=50, num_bytes=200), context=8)
    assert job.evaluate is not None
    train, held_out = files_of(job.dataset), files_of(job.evaluate.dataset)
    assert len(held_out) == 1
    assert train | held_out == {b"%d" % number for number in range(50)}
    assert not train & held_out
    assert files_of(job.dataset) == train
    assert torch.equal(job.dataset().bytes, text(tmp_path, context=8).dataset().bytes)


@pytest.mark.slow
def test_it_learns(tmp_path: Path) -> None:
    """A tiny model memorizes a sentence: from above 6 bits per byte to below 2.5, on a held-out file.

    Its loss is a mean over bytes: all positions of a batch count, without a shift.
    """
    job = text(filled(tmp_path), context=32, width=32, num_layers=1, num_heads=2)
    run = start(job, RunConfig(effective_batch_size=16, learning_rate=0.02, steps=60, micro_batch_size=8))
    before = run.evaluate()["bits_per_byte"]
    reports = [run.engine.step(batch) for batch in run.batches]
    assert float(reports[0].counts[0]) == 16 * 32
    assert before > 6.0
    assert run.evaluate()["bits_per_byte"] < 2.5
