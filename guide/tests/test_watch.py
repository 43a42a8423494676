"""`anybatch watch` reads growing and hostile logs in bounded memory."""

import dataclasses
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import anybatch as ab
from anybatch.cli.status import Status
from anybatch.diagnostics.spike_log import read_spikes
from anybatch.errors import UserError
from anybatch_guide.watch import command, curve
from anybatch_guide.watch.curve import CLIPPED, MAX_BUCKETS, NUM_PREVIEW_STEPS, SKIPPED, Curve, Step, preview_of
from anybatch_guide.watch.fields import MAX_TEXT, cleaned
from anybatch_guide.watch.lanes import lanes_of
from anybatch_guide.watch.notes import save_note
from anybatch_guide.watch.rank_log import SpanLines
from anybatch_guide.watch.repeat import command_of
from anybatch_guide.watch.stability import Stability, has_diverged
from anybatch_guide.watch.verdict import compare
from anybatch_guide.watch.watching import WatchedRuns, encoded
from guide.tests.hostile_logs import hostile_logs, line, span, start, step
from guide.tests.served import Served


def made(number: int, loss: float, flags: int = 0) -> Step:
    """Return a step of 8 samples that takes a second."""
    return Step(step=number, samples=8, seconds=number + 1.0, loss=loss, norm=1.0, rate=0.1, flags=flags)


def curve_of(losses: list[float], first: int = 0) -> Curve:
    """Return the curve of some losses."""
    made_of = Curve()
    for number, loss in enumerate(losses, start=first):
        made_of.add(made(number, loss))
    return made_of


def written(folder: Path, content: bytes) -> Path:
    """Write the log of a run, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "events.jsonl").write_bytes(content)
    return folder


def view_of(*folders: Path, at: int = 0) -> dict[str, object]:
    """Return the data of a run, as received by the page."""
    return dict(json.loads(encoded(WatchedRuns(list(folders)).read_all()[at])))


def texts(value: object) -> Iterator[str]:
    """Yield every text in a view, including names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from (key, *texts(item))
    elif isinstance(value, list):
        for item in value:
            yield from texts(item)


def test_extreme_losses_are_drawn() -> None:
    """For any number of steps, each section is drawn by its smallest and largest loss, at their steps."""
    rng = random.Random(0)
    losses = [rng.random() for _ in range(10_000)]
    losses[7_777], losses[4_444] = 90.0, -90.0
    points = curve_of(losses).points()["loss"]

    assert len(points["step"]) <= 2 * MAX_BUCKETS
    assert (max(points["value"]), min(points["value"])) == (90.0, -90.0)
    for number, value in zip(points["step"], points["value"], strict=True):
        assert value == pytest.approx(losses[number], rel=1e-6)
    assert points["samples"] == [8 * (number + 1) for number in points["step"]]
    assert points["step"] == sorted(points["step"])


def test_a_resumed_run_equals_an_uninterrupted_one() -> None:
    """Repeated steps of a resumed run replace the first ones in losses, samples and counts."""
    torn, through = Curve(), Curve()
    for number in range(30):
        flags = CLIPPED if number % 3 else SKIPPED
        through.add(made(number, 1.0 / (number + 1), flags=flags))
        if number < 20:
            torn.add(made(number, 1.0 / (number + 1), flags=flags))
    torn.drop_from(11)
    for number in range(11, 30):
        torn.add(made(number, 1.0 / (number + 1), flags=CLIPPED if number % 3 else SKIPPED))

    assert dataclasses.asdict(torn) == dataclasses.asdict(through)


def test_a_long_run_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above its limit, a curve keeps every second step, then every fourth, from start to end."""
    monkeypatch.setattr(curve, "MAX_STEPS", 100)
    long = curve_of([float(number) for number in range(1_000)])

    assert long.stride == 16
    assert list(long.steps) == list(range(0, 1_000, 16))
    assert list(long.losses) == [float(number) for number in long.steps]
    assert long.last is not None
    assert (long.last.step, long.num_samples) == (999, 8_000)


FACTS = {"effective_batch_size": 8, "seed": 0, "num_parameters": 10, "precision": "fp32", "dtype": "float32"}


@pytest.mark.parametrize(
    ("change", "facts", "word", "at"),
    [
        ({}, {}, "same", None),
        ({5: 1e-6}, {}, "same", None),
        ({5: 1e-3}, {}, "drifted", 5),
        ({5: float("nan")}, {}, "drifted", 5),
        ({5: 1e-3}, {"precision": "bf16"}, "same", None),
        ({5: 1e-6}, {"dtype": "float64", "precision": "float64"}, "same", None),
        ({0: 1e-3}, {}, "another", 0),
        ({}, {"seed": 1}, "another", None),
        ({}, {"effective_batch_size": 16}, "another", None),
        ({}, {"num_parameters": 11}, "another", None),
        ({}, {"strategy": "ddp"}, "same", None),
    ],
)
def test_verdicts(change: dict[int, float], facts: dict[str, object], word: str, at: int | None) -> None:
    """Runs are equal up to rounding, have drifted since the first larger difference, or are different."""
    losses = [2.0 / (number + 1) for number in range(20)]
    other = [loss * (1 + change.get(number, 0.0)) for number, loss in enumerate(losses)]
    found = compare(FACTS, curve_of(losses), {**FACTS, **facts}, curve_of(other))

    assert (found.word, found.step, found.num_steps) == (word, at, 20)
    assert bool(found.reasons) == (word == "another")


def test_lanes_show_which_rank_waits() -> None:
    """Of two ranks that wait 1 and 5 seconds for a sum, 1 is communication and 4 is waiting for the other rank."""
    ranks = {}
    for rank, wait in ((0, 1.0), (1, 5.0)):
        lines = [
            span("begin", 10.0 - wait, 3, "reduce"),
            span("end", 10.0, 3, "reduce"),
            span("begin", 1.0, 3),
            span("end", 1.5, 3),
        ]
        ranks[rank] = [SpanLines(3, 10.0, lines)]
    lanes = lanes_of(ranks)

    assert lanes is not None
    assert [(part["load"], part["exposed"], part["others"]) for part in lanes["parts"]] == [
        (0.5, 1.0, 0.0),
        (0.5, 1.0, 4.0),
    ]
    assert min(one["from"] for one in lanes["spans"]) == 0.0


def test_a_log_of_two_stretches(tmp_path: Path) -> None:
    """Geometry and its changes, evaluations, checkpoints, diagnoses and the end equal the log."""
    content = b"".join((
        start(), step(0), step(1, 0.5, 3.0, clipped=True),
        line("out_of_memory", step=2, micro_batch_size_before=4, micro_batch_size_after=2),
        step(2, 0.4, 4.0), line("evaluate", step=3, num_samples=5, metrics={"accuracy": 0.75}),
        start(first_step=2, geometry="other", time_seconds=900.0), step(2, 0.3, 901.0),
        line("checkpoint", step=3, event="saved", path="there", num_bytes=7, message=None, seconds=901.5),
        line("diagnosis", rank=0, step=2, level="warning", code="spike", message="high", remedy="lower", seconds=902.0),
        line("end", status="failed", num_steps=3, message="gone", digest=None, seconds=903.0),
    ))  # fmt: skip
    view = view_of(written(tmp_path / "run", content))

    assert view["curves"]["loss"]["value"] == [1.0, 0.5, 0.3]  # type: ignore[index]
    assert view["curves"]["loss"]["seconds"] == [1.0, 2.0, 4.0]  # type: ignore[index]
    assert [one["text"] for one in view["geometry"]] == [  # type: ignore[attr-defined]
        "8 samples = 1 rank x 2 micro-batches x 4",
        "micro-batches of at most 2 instead of 4",
        "other",
    ]
    assert (view["state"], view["message"], view["counts"]) == ("failed", "gone", {"clipped": 1, "skipped": 0})
    assert view["evaluations"] == []  # a resume discarded it
    assert view["checkpoints"][0]["path"] == "there"  # type: ignore[index]
    assert view["diagnoses"][0]["remedy"] == "lower"  # type: ignore[index]


def test_a_log_is_read_as_it_grows(tmp_path: Path) -> None:
    """A log read in pieces of any length gives the same result; incomplete lines are never parsed."""
    content = start() + b"".join(step(number, number / 3, 2.0 + number) for number in range(40))
    whole = view_of(written(tmp_path / "whole", content))
    (tmp_path / "pieces").mkdir()
    watching, rng, at = WatchedRuns([written(tmp_path / "pieces", b"")]), random.Random(0), 0
    while at < len(content):
        size = rng.randint(1, 400)
        with (tmp_path / "pieces" / "events.jsonl").open("ab") as file:
            file.write(content[at : at + size])
        at += size
        watching.read_changes()
    pieces = json.loads(encoded(watching.read_all()[0]))

    for name in ("curves", "last", "facts", "counts", "num_skipped", "state"):
        assert pieces[name] == whole[name], name


def test_a_long_log_has_a_preview(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While most of a long log is unread, steps from the whole log are drawn, with their losses and times."""
    monkeypatch.setattr(curve, "_PREVIEW_BLOCK_BYTES", 2_000)
    log = written(tmp_path / "run", start() + b"".join(step(n, n / 7, 2.0 + n) for n in range(3_000))) / "events.jsonl"
    found = preview_of(log, log.stat().st_size)

    assert found is not None
    steps = found["step"]
    assert len(steps) == NUM_PREVIEW_STEPS
    assert steps[0] < 15
    assert steps[-1] > 2_970
    assert found["value"] == [pytest.approx(n / 7, rel=1e-6) for n in steps]
    assert found["samples"] == [8 * (n + 1) for n in steps]
    assert found["seconds"] == [n - steps[0] for n in steps]


def test_a_pause_before_a_resume_does_not_count(tmp_path: Path) -> None:
    """A resumed process logs its checkpoint and diagnoses before its start; the run did not work in between."""
    loaded = {"event": "loaded", "path": "there", "num_bytes": 7, "message": None}
    content = b"".join((
        start(), step(0, 1.0, 2.0), step(1, 0.9, 3.0),
        line("checkpoint", step=2, seconds=403.0, **loaded),
        line("diagnosis", rank=0, step=2, level="info", code="resumed", message="resumed", remedy=None, seconds=403.5),
        start(first_step=2, time_seconds=404.0), step(2, 0.8, 405.0),
    ))  # fmt: skip
    view = view_of(written(tmp_path / "run", content))

    assert view["last"]["seconds"] == 3.0  # type: ignore[index]
    assert view["last"]["step"] == 3  # type: ignore[index]  # as the console prints it


def test_steps_count_from_1(tmp_path: Path) -> None:
    """Curves, diagnoses, lanes and geometry number the steps as the console does."""
    found = line("diagnosis", rank=0, step=0, level="info", code=None, message="m", remedy=None)
    view: dict[str, Any] = view_of(written(tmp_path / "run", start() + step(0) + found + step(1)))

    assert view["curves"]["loss"]["step"] == [1, 2]
    assert view["diagnoses"][0]["step"] == 1
    assert view["geometry"][0]["step"] == 1


def noisy(num_steps: int, spike_at: int | None = None) -> list[float]:
    """Return the losses of a calm run, and of one with a spike."""
    rng = random.Random(0)
    losses = [2.0 + 0.02 * rng.random() for _ in range(num_steps)]
    return [loss * (5.0 if number == spike_at else 1.0) for number, loss in enumerate(losses)]


def test_spikes_are_those_of_the_command(tmp_path: Path) -> None:
    """A run's spikes equal the report of `anybatch spikes`, also after a resume and if the log grows."""
    losses = noisy(120, spike_at=80)
    content = start() + b"".join(step(number, loss, 2.0 + number) for number, loss in enumerate(losses[:90]))
    content += start(first_step=60) + b"".join(step(n, losses[n], 200.0 + n) for n in range(60, 120))
    folder = written(tmp_path / "run", content)
    view: dict[str, Any] = view_of(folder)
    expected = [spike.step + 1 for spike in read_spikes(folder).spikes]

    assert [spike["step"] for spike in view["spikes"]] == expected == [81]
    assert view["diverged"] is False
    pieces, found = Stability(), curve_of(losses)
    while pieces.read(found, 1, max_steps=7) or pieces.has_unread_steps:
        pass
    assert [spike["step"] for spike in pieces.spikes] == [81]


@pytest.mark.parametrize(
    ("losses", "diverged"),
    [
        ([2.4, 73.0, 14.0, 13.0, 12.0], True),
        ([2.4, 2.3, float("nan")], True),
        ([2.4, 900.0, 400.0, 9.0, 2.5, 2.3, 2.3, 2.3, 2.3, 2.3, 2.3, 2.3], True),
        ([2.5, 6e5, 2e5, 90.0, *[2.05] * 12], True),
        ([2.5, 6e5, 2e5, 90.0, *[1.5] * 12], False),
        ([2.4, 2.5, 2.6, 2.5, 2.4, 2.5], False),
        ([2.4, 2.3, 2.2, 2.1], False),
        ([2.4, 73.0, 1.4, 1.3, 1.2, 1.1, 1.0, 0.9], False),
        ([2.4], False),
        ([], False),
    ],
)
def test_a_diverged_run_is_marked(losses: list[float], diverged: bool) -> None:
    """A run has diverged if its loss is not finite or stays far above its first losses."""
    assert has_diverged(curve_of(losses)) == diverged


def test_only_equal_settings_drift(tmp_path: Path) -> None:
    """A different learning rate is named as the reason for other losses; another split of the batch is not."""
    runs = []
    for name, settings, factor in (
        ("first", {}, 1.0),
        ("rate", {"learning_rate": 0.2}, 1.1),
        ("split", {"micro_batch_size": 2}, 1.1),
    ):
        runs.append(written(tmp_path / name, start() + step(0) + step(1, 0.9 * factor)))
        header(runs[-1], **settings)
    verdicts = [run["verdict"] for run in WatchedRuns(runs).read_all()]

    assert [verdict["word"] for verdict in verdicts] == ["reference", "another", "drifted"]
    assert verdicts[1]["reasons"] == ("learning rate: 0.1 there, 0.2 here",)


def test_any_loop_can_be_recorded(tmp_path: Path) -> None:
    """Settings, metrics of the whole run and the end of a loop with `ab.record` are shown."""
    with ab.record(tmp_path / "mine", rate=0.1) as run:
        for number in range(1_000):
            run.step(2.0 / (number + 1), num_samples=8, accuracy=number / 1_000)
    view: dict[str, Any] = view_of(tmp_path)
    steps = [evaluation["step"] for evaluation in view["evaluations"]]

    assert (view["state"], view["settings"], view["last"]["step"]) == ("completed", {"rate": "0.1"}, 1_000)
    assert (steps[0], steps[-1]) == (1, 1_000)
    assert len(steps) <= 200


def test_what_a_loop_does_not_record_is_missing(tmp_path: Path) -> None:
    """Facts that `ab.record` was not given are missing, not texts, and settings of `anybatch train` are unknown."""
    trained = written(tmp_path / "trained", start() + step(0))
    header(trained, learning_rate=0.2)
    for name, sizes in (("bare", {}), ("sized", {"effective_batch_size": 16, "micro_batch_size": 4})):
        with ab.record(tmp_path / name, learning_rate=0.1, **sizes) as run:
            run.step(2.0)
    bare: dict[str, Any] = view_of(trained, tmp_path / "bare", at=1)
    sized: dict[str, Any] = view_of(trained, tmp_path / "sized", at=1)

    assert "not recorded" not in set(texts(bare))
    assert (bare["facts"]["geometry"], bare["geometry"]) == (None, [])
    assert sized["facts"]["geometry"] == "16 samples = 1 rank x 4 micro-batches x 4"
    assert bare["verdict"]["reasons"] == ["learning rate: 0.2 there, 0.1 here"]


def test_new_runs_appear(tmp_path: Path) -> None:
    """A run that begins in a watched folder is added after the others."""
    written(tmp_path / "first", start() + step(0))
    watching = WatchedRuns([tmp_path])
    watching.read_changes()
    written(tmp_path / "second", start() + step(0, 0.5))
    views: dict[int, str] = {}
    for _ in range(9):
        views |= watching.read_changes()

    assert [run.name for run in watching.runs] == ["first", "second"]
    assert json.loads(views[1])["last"]["loss"] == 0.5


@pytest.mark.slow
def test_hostile_logs_are_data(tmp_path: Path) -> None:
    """Any log becomes a small JSON view, with short and harmless texts."""
    for name, content in hostile_logs():
        view = WatchedRuns([written(tmp_path / name.replace("/", " "), content)]).read_all()[0]
        text = encoded(view)

        assert len(text) < 700_000, name
        assert view["last"] is not None, name  # the good step in it is read
        for one in texts(json.loads(text)):
            assert len(one) <= MAX_TEXT, name
            assert cleaned(one, MAX_TEXT) == one, name


def test_invisible_characters_are_replaced() -> None:
    """Control and direction characters are replaced, line breaks stay, and long texts are truncated."""
    assert cleaned("a\u202eb\x1b[2J\ud800", 100) == "a\ufffdb\ufffd[2J\ufffd"
    assert cleaned("a\nb\tc", 100) == "a\nb\tc"
    assert cleaned("a" * 100, 10) == "a" * 9 + "…"


SETTINGS = {
    "effective_batch_size": 8,
    "micro_batch_size": "auto",
    "steps": 5,
    "learning_rate": 0.1,
    "strategy": "auto",
    "seed": 3,
}


def header(folder: Path, recipe: object = "digits", **settings: object) -> Path:
    """Write the settings of a run."""
    content = {
        "origin": {"recipe": recipe, "ranks": 2},
        "stretches": [{"first_step": 0, "settings": {**SETTINGS, **settings}}],
    }
    (folder / "run.json").write_text(json.dumps(content))
    return folder / "run.json"


def test_the_command_that_repeats_a_run(tmp_path: Path) -> None:
    """The settings in `run.json` become a command that the parser accepts."""
    from anybatch.cli.train import read_request  # noqa: PLC0415 (the parser of another verb)

    told = command_of(header(tmp_path), tmp_path)["command"]
    assert told == (
        "anybatch train digits --ranks 2 --effective-batch-size 8 --micro-batch-size auto --steps 5 "
        "--learning-rate 0.1 --seed 3"
    )
    assert read_request(told.split()[2:]).config.effective_batch_size == 8


def test_hostile_requests_give_no_command(tmp_path: Path) -> None:
    """Values are quoted for the shell; options, unprintable values and non-strings give no command."""
    told = command_of(header(tmp_path, recipe="a.py; rm -rf ~ $(x)"), tmp_path)["command"]
    assert "'a.py; rm -rf ~ $(x)'" in told
    hostile: tuple[object, ...] = ("--out=/", "a\nrm", "a\x1b[2J", "a" * 10_000, ["a"], None, {})
    for recipe in hostile:
        assert command_of(header(tmp_path, recipe=recipe), tmp_path)["command"] is None
    assert command_of(header(tmp_path, seed=["--out"]), tmp_path)["command"] is None
    (tmp_path / "run.json").write_text("[" * 100_000)
    assert command_of(tmp_path / "run.json", tmp_path)["command"] is None


def test_a_path_without_a_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path without a log, and a missing default folder, are reported; a pipe does not block."""
    with pytest.raises(UserError):
        WatchedRuns([tmp_path])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError):
        command.run(["--no-browser"])
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "events.jsonl")
        with pytest.raises(UserError):
            WatchedRuns([tmp_path])


def test_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exported file contains the runs as safe embedded data, and makes no requests."""
    run, page = written(tmp_path / "run", next(iter(hostile_logs()))[1]), tmp_path / "page.html"

    assert command.run([str(run), "--export", str(page)]) == Status.DONE
    html = page.read_text(encoding="utf-8")
    assert capsys.readouterr().out == f"wrote {page}\n"
    assert "<img src=x" not in html
    assert r"\u003cimg src=x" in html
    assert "connect-src 'none'" in html


@pytest.mark.slow
def test_notes_are_saved_next_to_the_log(tmp_path: Path) -> None:
    """A title and a note survive a restart, are harmless text, and need the secret; other bodies are refused."""
    serve = ("import sys; from anybatch_guide.watch.command import run; run(sys.argv[1:])", "--no-browser")
    folder = written(tmp_path / "run", start() + step(0))
    note = {"at": 0, "title": "best", "note": "warm-up \u202e too short"}
    with Served(tmp_path, command=(sys.executable, "-c", *serve, str(folder))) as server:
        asked = [
            server.ask("POST", "/api/note", note),
            server.ask("POST", "/api/note", {**note, "at": 1}),
            server.ask("POST", "/api/note", {**note, "at": True}),
            server.ask("POST", "/api/note", {"at": 0}),
            server.ask("POST", "/api/note", "["),
            server.ask("POST", "/api/note", note, headers={"Cookie": ""}),
            server.ask("POST", "/api/note", note, headers={"Sec-Fetch-Site": "cross-site"}),
        ]
    view = view_of(folder)

    file = folder / "watch.json"
    saved = file.read_text()
    file.write_text(saved[:-1])  # edited by hand, and no longer JSON
    with pytest.raises(OSError, match="move it away"):
        save_note(folder / "events.jsonl", "other", "")
    assert file.read_text() == saved[:-1], "no note is lost"
    assert view_of(folder)["title"] == ""
    file.write_text(saved)

    assert [answer.status for answer in asked] == [200, 422, 422, 422, 422, 403, 403]
    assert (view["title"], view["note"]) == ("best", "warm-up \ufffd too short")
    assert sorted(path.name for path in folder.iterdir()) == ["events.jsonl", "watch.json"]


@pytest.mark.slow
def test_access_is_restricted(tmp_path: Path) -> None:
    """Requests without the secret, from another page, with another host, or with changes are refused."""
    serve = ("import sys; from anybatch_guide.watch.command import run; run(sys.argv[1:])", "--no-browser")
    with Served(tmp_path, command=(sys.executable, "-c", *serve, str(written(tmp_path / "run", start())))) as server:
        asked = {
            "page": server.ask("GET", "/"),
            "stream without secret": server.ask("GET", "/api/watch", headers={"Cookie": ""}),
            "another page": server.ask("GET", "/api/watch", headers={"Sec-Fetch-Site": "cross-site"}),
            "another name": server.ask("GET", "/api/watch", headers={"Host": "evil.example"}),
            "a change": server.ask("POST", "/api/watch", {}),
            "a log": server.ask("GET", "/run/events.jsonl"),
            "the guide's runs": server.ask("GET", "/api/state"),
        }
    found = {name: answer.status for name, answer in asked.items()}

    assert list(found.values()) == [200, 403, 403, 421, 405, 404, 404], found
    assert "default-src 'none'" in asked["page"].headers["content-security-policy"]
    assert server.said[0].endswith("watch  stopped\n")
    assert server.said[1] == ""
