"""The console shows a progress bar on a terminal and lines elsewhere, with the same numbers."""

import io
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from rich.console import Console as Terminal

from anybatch.core.records import PhaseRecord, Record
from anybatch.events.console import Console, SafeStream, Screen, ScreenContents
from anybatch.events.observer import Level
from tests.events.recorded_run import (
    Clock,
    checkpoint,
    diagnosis,
    end,
    evaluation,
    memory,
    micro_batch,
    out_of_memory,
    start,
    step,
    whole_run,
)

WIDTHS = (60, 100, 200)


class RecordingScreen(Screen):
    """A terminal's screen that records its calls."""

    def __init__(self) -> None:
        super().__init__(Terminal(file=io.StringIO(), force_terminal=True, width=80))
        self.lines: list[tuple[str, Level]] = []
        self.moments: list[ScreenContents] = []
        self.num_closed = 0

    def say(self, line: str, level: Level, /) -> None:
        self.lines.append((line, level))

    def show(self, moment: ScreenContents, /) -> None:
        self.moments.append(moment)

    def close(self) -> None:
        self.num_closed += 1

    @property
    def last(self) -> dict[str, str]:
        """The cells shown last, by label."""
        cells = [*self.moments[-1].cells, *filter(None, [self.moments[-1].underway])]
        return {cell.label: cell.value for cell in cells}


class TerminalStream(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        super().isatty()  # raises if closed
        return True


class CountingTensor(torch.Tensor):
    """A tensor that counts its reads."""

    num_read = 0

    def item(self) -> Any:
        type(self).num_read += 1
        return super().item()


def plain(records: Sequence[Record], *, total_steps: int | None = None, seconds: float = 1.0) -> list[str]:
    """Return the printed lines of a run whose records are `seconds` apart."""
    stream, clock = io.StringIO(), Clock()
    console = Console(total_steps, stream=stream, clock=clock)
    for record in records:
        console.observe(record)
        clock.seconds += seconds
    return stream.getvalue().splitlines()


def watched(records: Sequence[Record], *, total_steps: int | None = None, seconds: float = 1.0) -> RecordingScreen:
    """Return the recorded screen of such a run."""
    screen, clock = RecordingScreen(), Clock()
    console = Console(total_steps, screen=screen, clock=clock)
    for record in records:
        console.observe(record)
        clock.seconds += seconds
    return screen


def drawn(moment: ScreenContents, width: int) -> list[str]:
    """Return screen contents as a terminal of some width shows them, without colors."""
    terminal = Terminal(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    with terminal.capture() as capture:
        terminal.print(moment)
    return [line.rstrip() for line in capture.get().splitlines()]


def long_run() -> list[Record]:
    """Return a run whose displayed values all have their maximum width."""
    names = ("a_term_with_a_name_that_is_far_too_long", "b")
    wide = step(
        12_344,
        -1.234e-100,
        losses=dict.fromkeys(names, -1.234e-100),
        gradient_norm=1e-200,
        learning_rates=(1e-3, 1e-5),
        num_micro_batches=512,
    )
    return [start(12_344), *(micro_batch(12_344, position, num_micro_batches=512) for position in range(3)), wide]


# ---- lines ----


def test_lines_of_a_run() -> None:
    """Without a terminal, lines show the run, the first step, a step every five seconds, the last step and the end."""
    lines = plain(list(whole_run(12)), total_steps=12)

    assert lines[:3] == [
        "64 samples = 2 ranks x 2 micro-batches x 16",
        "cpu, precision fp32, 1,234 parameters of float32, gradients of 4.82 KiB, strategy all_reduce",
        "anybatch 0.1.0, torch 2.13.0",
    ]
    assert [line[:13] for line in lines[3:-1]] == ["step  1 of 12", "step  6 of 12", "step 11 of 12", "step 12 of 12"]
    assert lines[-1] == "completed after 13 s, 12 steps made"


def test_lines_have_the_numbers_of_the_step() -> None:
    """A line has the step's loss, gradient norm and rate, samples per second over all ranks, and the time left."""
    (line,) = [line for line in plain(list(whole_run(12)), total_steps=12) if line.startswith("step  6")]

    assert re.sub(" +", " ", line) == (
        "step 6 of 12 loss 0.333 gradient norm 1.25 learning rate 0.00100 samples/s 64.0 epoch 1 time 6.0 s left 6.0 s"
    )


def test_a_long_step_is_heard_of() -> None:
    """Without a terminal, a step of many minutes prints its progress every half minute."""
    records: list[Record] = [start(), step(0, num_micro_batches=100)]
    records += [micro_batch(1, position, num_micro_batches=100) for position in range(100)]
    lines = [line for line in plain(records, total_steps=2) if "micro-batch" in line]

    assert [re.sub(" +", " ", line).split(" left")[0] for line in lines[1:]] == [
        "step 1 of 2 micro-batch 30 of 100",
        "step 1 of 2 micro-batch 60 of 100",
        "step 1 of 2 micro-batch 90 of 100",
    ]


# ---- what happens ----


@pytest.mark.parametrize(
    ("record", "line", "level"),
    [
        (
            evaluation(40, accuracy=0.91234, loss=torch.tensor(float("nan"))),
            "step  40 of 100   evaluation of 1,000 samples: accuracy 0.912, loss NaN",
            "result",
        ),
        (checkpoint(40), "step  40 of 100   checkpoint saved: run/step (3.00 MiB)", "plain"),
        (
            out_of_memory(39),
            (
                "step  40 of 100   warning: out of memory in forward and backward: "
                "micro-batch 16 -> 8 samples, repeating the step"
            ),
            "warning",
        ),
        (diagnosis("two samples [bold]are equal[/bold]"), "warning: two samples [bold]are equal[/bold]", "warning"),
        (
            diagnosis("found 3", step=39, level="info", remedy="Look again."),
            "step  40 of 100   note: found 3. Look again.",
            "plain",
        ),
        (end(40, status="failed", message="E: first\nsecond"), "failed, 40 steps made: E: first", "error"),
    ],
)
def test_happenings_are_said(record: Record, line: str, level: Level) -> None:
    """Each event is one sentence, with steps counted from 1."""
    assert watched([record], total_steps=100).lines == [(line, level)]


def test_skipped_steps_are_said_once() -> None:
    """Skipped steps are listed in one warning, also if their flags are tensors on a device."""
    flags = (False, True, torch.tensor(True), torch.tensor(False), torch.tensor(True))
    screen = watched([start(), *(step(n, skipped=flag) for n, flag in enumerate(flags)), end(5)], seconds=0.01)

    warnings = [line for line, level in screen.lines if level == "warning"]
    assert warnings == [
        "step       5   warning: update skipped, because the gradient was not finite, in 3 steps: 2, 3, 5"
    ]


# ---- numbers ----


def test_rate_and_time_left() -> None:
    """Samples per second exclude evaluations; the time left includes them."""
    records: list[Record] = [start(), step(0), step(1), step(2), evaluation(3), step(3)]
    screen = watched(records, total_steps=13, seconds=2.0)

    assert screen.last["samples/s"] == "32.0"
    assert screen.moments[-1].time_left == "24 s"  # 9 steps left, and the last 3 took 8 s with the evaluation


def test_numbers_that_are_none() -> None:
    """A NaN loss is shown as NaN, and a number whose device is lost as a dash."""
    lost = torch.tensor(0.0, device="meta")
    screen = watched([start(), step(0, torch.tensor(float("nan")), gradient_norm=lost, skipped=lost)])

    assert (screen.last["loss"], screen.last["gradient norm"]) == ("NaN", "-")


def test_terms_and_rates() -> None:
    """Several loss terms are shown with their sum, under shortened names; several learning rates as a range."""
    terms = {"reconstruction_of_the_image": 2.0, "kl": 0.5}
    screen = watched([start(), step(0, 2.5, losses=terms, learning_rates=(0.1, torch.tensor(0.01), 0.1))])

    assert screen.last | {"loss": "2.50", "recons..image": "2.00", "kl": "0.500"} == screen.last
    assert screen.last | {"highest rate": "0.100", "lowest rate": "0.0100"} == screen.last
    assert "learning rate" not in screen.last


def test_memory_comes_from_records() -> None:
    """The last recorded memory peak is shown, with its limit if there is one; a new start resets it."""
    no_limit = memory(0, peak_bytes=2**20)
    limited = memory(1, peak_bytes=2**30, limit_bytes=2**33)

    assert "memory" not in watched([start(), step(0)]).last
    assert watched([start(), no_limit, step(0)]).last["memory"] == "1.00 MiB"
    assert watched([start(), no_limit, step(0), limited, step(1)]).last["memory"] == "1.00 of 8.00 GiB"
    assert "memory" not in watched([start(), limited, step(0), end(1), start(), step(0)]).last


def test_the_loop_does_not_wait() -> None:
    """Tensors are read only for steps that are shown."""
    CountingTensor.num_read = 0
    loss = torch.tensor(0.5).as_subclass(CountingTensor)
    steps = [step(number, loss) for number in range(100)]
    screen = watched([start(), *steps, end(100)], seconds=0.05)  # 100 steps in 5 s, shown every 0.25 s

    assert len(screen.moments) <= 5 / 0.25 + 3
    assert CountingTensor.num_read == len(screen.moments) - 1  # the moment before the first step has no loss


def test_progress_within_a_step() -> None:
    """Micro-batches move the bar within a step, and their count restarts with the next step."""
    records: list[Record] = [start(), *(micro_batch(0, half // 2, ("begin", "end")[half % 2]) for half in range(8))]
    screen = watched([*records, step(0, num_micro_batches=4)], total_steps=2)

    assert [moment.share for moment in screen.moments] == [0, 0, 1 / 8, 1 / 8, 1 / 4, 1 / 4, 3 / 8, 3 / 8, 1 / 2, 1 / 2]
    assert screen.last["micro-batch"] == "4 of 4"


def test_only_rank_0_speaks() -> None:
    """Records of other ranks, and of unknown kinds, show nothing."""
    unknown: Any = type("Unknown", (), {"rank": 0, "kind": "unknown"})()
    phase = PhaseRecord(rank=0, event="begin", step=0, name="clip", position=None)
    screen = watched([start(rank=1), step(0, rank=1), end(1, rank=1), phase, unknown])

    assert (screen.lines, screen.moments, screen.num_closed) == ([], [], 0)


# ---- a terminal ----


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("records", [list(whole_run(3)), long_run()], ids=["short", "long"])
def test_every_width_fits(records: list[Record], width: int) -> None:
    """From 60 to 200 columns nothing is cut off or wrapped, and numbers are right-aligned in columns."""
    moment = watched(records, total_steps=20_000).moments[-1]
    bar, *rows = drawn(moment, width)

    assert bar.startswith(moment.heading)
    assert bar.endswith("left")
    assert len(bar) == width
    assert all(len(row) <= width for row in rows)
    shown = " ".join(" ".join(rows).split())
    assert all(f"{cell.label} {cell.value}" in shown for cell in moment.cells)
    fields = [row[start : start + 27] for row in rows for start in range(0, len(row), 27)]
    assert all(field[23] != " " and not field[24:].strip() for field in fields)


def test_a_terminal_is_given_back() -> None:
    """The cursor is hidden while the bar is shown, and restored at the end, on close and on garbage collection."""
    ends: list[Any] = [
        lambda consoles: consoles[0].observe(end(1)),
        lambda consoles: consoles[0].close(),
        lambda consoles: consoles.clear(),
    ]
    for finish in ends:
        stream = io.StringIO()
        terminal = Terminal(file=stream, width=80, force_terminal=True)
        consoles = [Console(1, screen=Screen(terminal))]
        for record in (start(), step(0)):
            consoles[0].observe(record)
        assert [stream.getvalue().count(code) for code in ("\x1b[?25l", "\x1b[?25h")] == [1, 0]
        finish(consoles)
        assert [stream.getvalue().count(code) for code in ("\x1b[?25l", "\x1b[?25h")] == [1, 1]


def test_a_pipe_gets_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines for a pipe have no control characters, even where colors or interaction are forced."""
    for name in ("FORCE_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE"):
        monkeypatch.setenv(name, "1")
    lines = plain([*whole_run(3), diagnosis("look at " + "a long line " * 40)])

    assert all(line.isprintable() for line in lines)
    assert lines[-1].endswith("long line")


def test_markup_is_not_read() -> None:
    """Square brackets and colons in names and messages are not interpreted as markup."""
    stream = io.StringIO()
    screen = Screen(Terminal(file=stream, width=80, force_terminal=True, color_system=None))
    screen.say("[red]:smile: a[0]", "plain")

    assert stream.getvalue() == "[red]:smile: a[0]\n"


# ---- streams that fail ----


@pytest.mark.parametrize("error", [BrokenPipeError, ValueError])
def test_a_lost_stream_does_not_end_the_run(error: type[Exception]) -> None:
    """If its stream fails, the console stops printing, and the run continues."""

    class Lost(io.StringIO):
        num_tried = 0

        def write(self, _text: str, /) -> int:
            self.num_tried += 1
            raise error

    stream = Lost()
    console = Console(2, stream=stream)
    for record in whole_run(2):
        console.observe(record)
    assert stream.num_tried == 1


def test_letters_that_an_encoding_lacks() -> None:
    """Characters outside of the terminal's encoding are escaped, and the bar is drawn in ASCII."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", errors="strict")
    terminal = Terminal(file=SafeStream(stream), width=80, force_terminal=True, color_system="standard")  # type: ignore[arg-type]
    with Console(2, screen=Screen(terminal)) as console:
        for record in (start(), step(0), evaluation(1, μ=0.5)):
            console.observe(record)
    text = raw.getvalue()

    assert b"\\u03bc 0.500" in text
    assert b"---" in text
