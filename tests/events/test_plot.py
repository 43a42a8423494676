"""The plot of a run shows its log, without steps that a resume discarded."""

import importlib
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from anybatch.core.records import Record
from anybatch.errors import UserError
from anybatch.events.drawing import make_figure
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


def figure_of(log: Path, records: Iterable[Record]) -> Figure:
    """Return the figure of a run."""
    return make_figure(read_curves(logged(log, records)))


def line(panel: Axes, label: str) -> tuple[list[float], list[float]]:
    """Return the points of a panel's only line with this label."""
    (found,) = [line for line in panel.lines if line.get_label() == label]
    return points(found)


def points(drawn: Any) -> tuple[list[float], list[float]]:
    """Return the points of a line."""
    steps, values = drawn.get_data()
    return [float(one) for one in steps], [float(one) for one in values]


def legend(figure: Figure) -> list[str]:
    """Return the labels of a figure's legend."""
    return [text.get_text() for text in figure.legends[0].get_texts()]


def drawn_curves(log: Path, records: Iterable[Record]) -> Curves:
    """Return the curves of a run."""
    return read_curves(logged(log, records))


# ---- curves ----


def test_curves_are_the_records(log: Path) -> None:
    """A step is plotted at the number of steps including it, an evaluation at the number before it."""
    records: list[Record] = [
        start(),
        step(0, 2.0),
        step(1, torch.tensor(1.0), skipped=torch.tensor(True)),
        evaluation(2, x=0.5),
    ]
    curves = drawn_curves(log, [*records, out_of_memory(2), step(2, 0.5, learning_rates=(0.1,)), end(3)])

    assert (curves.steps, curves.losses.tolist()) == ([1, 2, 3], [2.0, 1.0, 0.5])
    assert [rates.tolist() for rates in curves.learning_rates] == [pytest.approx([0.001, 0.001, 0.1])]
    assert curves.metrics == {"x": {2: 0.5}}
    assert (curves.skipped, curves.resumed, curves.out_of_memory) == ([2], [], [3])


def test_undone_steps_are_left_out(log: Path) -> None:
    """After a resume, only the earlier session's steps before it count, with their evaluations."""
    first: list[Record] = [start(), *(step(number, 1.0, skipped=number == 5) for number in range(6))]
    first += [evaluation(4, x=0.1), evaluation(6, x=0.2), out_of_memory(5)]
    second: list[Record] = [start(4), step(4, 2.0), evaluation(5, x=0.3), end(5)]
    curves = drawn_curves(log, [*first, *second])

    assert (curves.steps, curves.losses.tolist()) == ([1, 2, 3, 4, 5], [1.0, 1.0, 1.0, 1.0, 2.0])
    assert curves.metrics == {"x": {4: 0.1, 5: 0.3}}
    assert (curves.skipped, curves.resumed, curves.out_of_memory) == ([], [4], [])


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 8)), min_size=1, max_size=5))
@pytest.mark.slow
def test_the_lineage_of_the_final_parameters_is_kept(
    tmp_path_factory: pytest.TempPathFactory, sessions: list[tuple[int, int]]
) -> None:
    """After any sequence of resumes, each step appears once, with its last loss."""
    records: list[Record] = []
    lineage: list[float] = []
    for number, (wanted, num_steps) in enumerate(sessions):
        first = min(wanted, len(lineage))
        lineage = lineage[:first]
        records.append(start(first))
        for one in range(first, first + num_steps):
            lineage.append(number + one / 100)
            records.append(step(one, lineage[-1]))
    curves = drawn_curves(tmp_path_factory.mktemp("logs") / "log.jsonl", records)

    assert curves.steps == list(range(1, len(lineage) + 1))
    assert curves.losses.tolist() == lineage


# ---- smoothing ----


@given(st.lists(st.floats(-10, 10) | st.just(NAN), min_size=1, max_size=60), st.floats(0.5, 9.0))
@pytest.mark.slow
def test_smoothing_is_a_weighted_mean(values: list[float], num_steps: float) -> None:
    """Each smoothed value is the Gaussian-weighted mean of the finite values around it."""
    reach = math.ceil(4 * num_steps)
    expected = []
    for here, value in enumerate(values):
        around = [
            (math.exp(-(((there - here) / num_steps) ** 2) / 2), other)
            for there, other in enumerate(values)
            if math.isfinite(other) and abs(there - here) <= reach
        ]
        mean = sum(weight * other for weight, other in around) / sum(weight for weight, _ in around) if around else NAN
        expected.append(mean if math.isfinite(value) else NAN)
    found = smoothed(torch.tensor(values, dtype=torch.float64), num_steps).tolist()

    assert found == pytest.approx(expected, nan_ok=True, abs=1e-9)


# ---- pictures ----


@pytest.mark.parametrize("num_steps", [10, 1_000])
def test_the_loss_is_drawn(log: Path, num_steps: int) -> None:
    """Every loss is drawn, with a smoothed line from 50 steps on, and with dots below that."""
    panel = figure_of(log, whole_run(num_steps)).axes[0]
    steps, losses = line(panel, "loss of a step")

    assert steps == list(range(1, num_steps + 1))
    assert losses == pytest.approx([2.0 / number for number in range(1, num_steps + 1)])
    labels = [line.get_label() for line in panel.lines]
    assert ("loss, smoothed" in labels) == (num_steps >= 50)
    assert panel.lines[0].get_marker() == ("o" if num_steps < 50 else "None")


def test_gaps_are_seen(log: Path) -> None:
    """Non-finite losses break the line and are shaded and counted; isolated values get a dot."""
    losses = [NAN if number in (10, 11, 12, 60, 62) else 1.0 for number in range(100)]
    figure = figure_of(log, [start(), *(step(number, loss) for number, loss in enumerate(losses))])
    panel = figure.axes[0]

    _, drawn = line(panel, "loss of a step")
    assert [math.isnan(value) for value in drawn] == [math.isnan(loss) for loss in losses]
    assert line(panel, "loss not finite (5)")[0] == [12.0, 61.0, 63.0]
    (shades,) = panel.collections
    assert [path.get_extents().intervalx.tolist() for path in shades.get_paths()] == [
        [10.5, 13.5],
        [60.5, 61.5],
        [62.5, 63.5],
    ]
    dots = [line for line in panel.lines if line.get_marker() == "o"]
    assert [points(dot)[0] for dot in dots] == [[62.0]]


def test_evaluations_are_drawn(log: Path) -> None:
    """An evaluated loss is drawn with the loss, in a separate shape; other metrics get a panel and their last value."""
    records = [step(number, 1.0, losses={"lm": 1.0, "aux": 0.1}) for number in range(4)]
    evaluations = [evaluation(after, lm=after, aux=2.0, accuracy=after / 10) for after in (2, 4)]
    figure = figure_of(log, [start(), *records, *evaluations])
    loss_panel, metric_panel, rate_panel = figure.axes

    assert line(loss_panel, "evaluated lm") == ([2.0, 4.0], [2.0, 4.0])
    shapes = [line.get_marker() for line in loss_panel.lines if str(line.get_label()).startswith("evaluated")]
    assert len(set(shapes)) == 2
    assert metric_panel.get_ylabel() == "accuracy"
    assert points(metric_panel.lines[0])[1] == [0.2, 0.4]
    assert [text.get_text() for text in metric_panel.texts] == ["0.400"]
    assert rate_panel.get_ylabel() == "learning\nrate"
    assert points(rate_panel.lines[0])[1] == [0.001] * 4


def test_what_happened_is_marked_and_counted(log: Path) -> None:
    """Skipped steps, out-of-memory events and resumes have separate marks, and their number in the legend."""
    records: list[Record] = [
        start(),
        step(0, skipped=True),
        step(1),
        out_of_memory(2),
        step(2),
        start(3),
        step(3, skipped=True),
    ]
    figure = figure_of(log, records)
    panel = figure.axes[0]

    assert line(panel, "update skipped (2)")[0] == [1.0, 4.0]
    assert line(panel, "out of memory (1)")[0] == [3.0]
    assert legend(figure)[-1] == "resumed (1)"
    assert all([3.5, 3.5] in [points(line)[0] for line in panel.lines] for panel in figure.axes)
    assert legend(figure) == ["loss of a step", "update skipped (2)", "out of memory (1)", "resumed (1)"]


def test_the_title_is_the_geometry(log: Path) -> None:
    """The title has the geometry, device and strategy of each session that changed them."""
    other = "64 samples = 4 ranks x 1 micro-batch x 16"
    records: list[Record] = [start(), step(0), start(1), step(1), start(2, geometry=other, device="cuda:0"), step(2)]
    panel = figure_of(log, records).axes[0]

    assert panel.texts[0].get_text() == f"{GEOMETRY}\nthen {other}"
    assert panel.get_title("left") == "3 steps on cpu, fp32, all_reduce; then cuda:0, fp32, all_reduce"


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
    assert "steps made" in svg
    assert "#123456" not in svg


@pytest.mark.slow
def test_the_same_log_gives_the_same_picture(log: Path, tmp_path: Path) -> None:
    """SVG and PDF files have no dates or random names, so drawing twice gives the same bytes."""
    records: list[Record] = [
        start(),
        *(step(number) for number in range(60)),
        evaluation(60, accuracy=0.5, **{"$x$ & <y>": 1.0}),
    ]
    logged(log, records)
    first = plot_losses(log, [tmp_path / "1.svg", tmp_path / "1.pdf"])
    second = plot_losses(log, [tmp_path / "2.svg", tmp_path / "2.pdf"])

    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert ">$x$ &amp; &lt;y&gt;</text>" in first[0].read_text(encoding="utf-8")


# ---- what cannot be drawn ----


def test_without_matplotlib(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib, the error has the install command, and nothing is written."""
    monkeypatch.delitem(sys.modules, "anybatch.events.drawing")
    monkeypatch.delattr(importlib.import_module("anybatch.events"), "drawing")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "a.png"

    with raises(UserError, "needs_matplotlib"):
        plot_losses(logged(log, whole_run(1)), [out])
    assert not out.exists()


def test_other_endings(log: Path) -> None:
    """An unsupported extension raises before anything is read."""
    with raises(UserError, "picture_format"):
        plot_losses(log, ["a.jpeg"])


def test_a_log_without_steps(log: Path, tmp_path: Path) -> None:
    """A log without steps raises with a possible reason; a missing log raises an OSError."""
    with raises(UserError, "no_steps"):
        plot_losses(logged(log, [start()]), [tmp_path / "a.png"])
    with pytest.raises(FileNotFoundError):
        plot_losses(tmp_path / "none.jsonl", [tmp_path / "a.png"])
