"""`anybatch demo`: the plain loop runs out of memory, and the engine's finishes."""

import pytest

from anybatch_guide.demo import run as demonstration


def test_three_lines_change() -> None:
    """The two loops of the demonstration differ by three added lines."""
    lines = demonstration.changed_lines()

    assert len([line for line in lines if line.startswith("+")]) == 3
    assert any("optimizer.step()" in line for line in lines if line.startswith("-"))


@pytest.mark.slow
@pytest.mark.published
def test_the_demonstration_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain loop runs out of memory, and the engine's finishes with the exact gradient."""
    monkeypatch.setattr(demonstration, "NUM_STEPS", 1)
    said: list[str] = []

    assert demonstration.demonstrate(said.append).is_as_intended

    text = "".join(said)
    assert "OutOfMemoryError" in text
    assert "64 samples = 1 rank x" in text
