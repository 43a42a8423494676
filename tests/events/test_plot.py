"""The plot of a run shows its log, without steps that a resume discarded."""

import math
import sys
from collections.abc import Iterable
from pathlib import Path

import matplotlib as mpl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anybatch.core.records import Record
from anybatch.errors import UserError
from anybatch.events.jsonl import JsonlLog
from anybatch.events.plot import Curves, plot_losses, read_curves, smoothed
from tests.events.recorded_run import GEOMETRY, end, evaluation, out_of_memory, start, step, whole_run
from tests.raising import raises

NAN = math.nan


def logged(path: Path, records: Iterable[Record]) -> Path:
    """Return a log of records."""
    with JsonlLog(path, num_steps_per_flush=1_000) as log:
        for record in records:
            log.observe(record)
    return path


@pytest.fixture(name="log")
def fixture_log(tmp_path: Path) -> Path:
    """Return a path for a log."""
    return tmp_path / "events.jsonl"


def drawn_curves(log: Path, records: Iterable[Record]) -> Curves:
    """Return the curves of a run."""
    return read_curves(logged(log, records))


def test_curves_match_the_records(log: Path) -> None:
    """A step is plotted at the number of steps including it, an evaluation at the number before it."""
    records: list[Record] = [
        start(),
        step(0, 2.0),
        step(1, torch.tensor(1.0), skipped=torch.tensor(True)),
        evaluation(2, x=0.5),
    ]
    curves = drawn_curves(log, [*records, out_of_memory(2), step(2, 0.5, learning_rates=(0.1,)), end(3)])

    assert curves.losses == {1: 2.0, 2: 1.0, 3: 0.5}
    assert curves.rates == {1: [0.001], 2: [0.001], 3: [0.1]}
    assert curves.metrics == {"x": {2: 0.5}}
    assert (curves.skipped, curves.resumed, curves.out_of_memory) == ({2}, set(), {3})


def test_discarded_steps_are_skipped(log: Path) -> None:
    """After a resume, only the earlier session's steps before it count, with their evaluations."""
    first: list[Record] = [start(), *(step(number, 1.0, skipped=number == 5) for number in range(6))]
    first += [evaluation(4, x=0.1), evaluation(6, x=0.2), out_of_memory(5)]
    second: list[Record] = [start(4), step(4, 2.0), evaluation(5, x=0.3), end(5)]
    curves = drawn_curves(log, [*first, *second])

    assert curves.losses == {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 2.0}
    assert curves.metrics == {"x": {4: 0.1, 5: 0.3}}
    assert (curves.skipped, curves.resumed, curves.out_of_memory) == (set(), {4}, set())


@given(st.lists(st.floats(-10, 10) | st.just(NAN), min_size=1, max_size=60), st.integers(1, 9))
def test_smoothing_is_a_mean(values: list[float], reach: int) -> None:
    """Each smoothed value is the mean of the finite values around it."""
    expected = []
    for here, value in enumerate(values):
        around = [other for other in values[max(0, here - reach) : here + reach + 1] if math.isfinite(other)]
        expected.append(sum(around) / len(around) if math.isfinite(value) else NAN)

    assert smoothed(values, reach) == pytest.approx(expected, nan_ok=True, abs=1e-9)


@pytest.mark.slow
def test_pictures_are_written(log: Path, tmp_path: Path) -> None:
    """Each format is written, in new folders if needed; SVG text stays text; matplotlib's settings are unchanged."""
    mpl.rcParams["axes.facecolor"] = "#123456"
    before = dict(mpl.rcParams)
    try:
        paths = plot_losses(
            logged(log, whole_run(3)), [tmp_path / "new" / name for name in ("a.png", "a.SVG", "a.pdf")]
        )
        assert dict(mpl.rcParams) == before
    finally:
        mpl.rcParams["axes.facecolor"] = mpl.rcParamsDefault["axes.facecolor"]

    heads = [path.read_bytes()[:5] for path in paths]
    assert heads == [b"\x89PNG\r", b"<?xml", b"%PDF-"]
    svg = paths[1].read_text(encoding="utf-8")
    assert GEOMETRY in svg
    assert "finished steps" in svg
    assert "#123456" not in svg


@pytest.mark.slow
def test_the_same_log_gives_the_same_picture(log: Path, tmp_path: Path) -> None:
    """Everything in a log is drawn, with counts in the legend; drawing twice gives the same bytes, without dates."""
    other = "64 samples = 4 ranks x 1 micro-batch x 16"
    records: list[Record] = [
        start(),
        *(step(n, 2.0 / (1 + n), losses={"lm": 1.0, "aux": 0.1}, skipped=n in (2, 50)) for n in range(60)),
        *(evaluation(after, lm=after / 60, aux=2.0, accuracy=0.5, **{"$x$ & <y>": 1.0}) for after in (30, 60)),
        step(60, NAN),
        out_of_memory(40),
        start(61, geometry=other, device="cuda:0"),
        step(61),
    ]
    logged(log, records)
    first = plot_losses(log, [tmp_path / "1.svg", tmp_path / "1.pdf"])
    second = plot_losses(log, [tmp_path / "2.svg", tmp_path / "2.pdf"])

    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    drawn = first[0].read_text(encoding="utf-8")
    assert ">$x$ &amp; &lt;y&gt;</text>" in drawn
    marks = ("loss not finite (1)", "update skipped (2)", "out of memory (1)", "resumed (1)")
    for text in ("evaluated lm", "accuracy", "loss, smoothed", "(cuda:0", *marks):
        assert text in drawn, text


def test_without_matplotlib(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib, the error has the install command, and nothing is written."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "a.png"

    with raises(UserError, "needs_matplotlib"):
        plot_losses(logged(log, whole_run(1)), [out])
    assert not out.exists()


def test_unsupported_extensions(log: Path) -> None:
    """An unsupported extension raises before anything is read."""
    with raises(UserError, "picture_format"):
        plot_losses(log, ["a.jpeg"])


def test_a_log_without_steps(log: Path, tmp_path: Path) -> None:
    """A log without steps raises with a possible reason; a missing log raises an OSError."""
    with raises(UserError, "no_steps"):
        plot_losses(logged(log, [start()]), [tmp_path / "a.png"])
    with pytest.raises(FileNotFoundError):
        plot_losses(tmp_path / "none.jsonl", [tmp_path / "a.png"])
