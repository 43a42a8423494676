"""The console shows a progress bar on a terminal and lines elsewhere, with the same numbers."""

import io
import re
from collections.abc import Callable, Sequence

import pytest
import torch
from rich.console import Console as Terminal

from anybatch.core.records import PhaseRecord, Record
from anybatch.events.console import Console, SafeStream, terminal_on
from tests.events.recorded_run import (
    Clock,
    CountingTensor,
    checkpoint,
    counting,
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


def shown(
    records: Sequence[Record], *, total_steps: int | None = None, seconds: float = 1.0, width: int | None = None
) -> str:
    """Return the output of a run whose records are `seconds` apart: of a terminal with a width, or of a pipe."""
    stream, clock = io.StringIO(), Clock()
    terminal = terminal_on(stream)
    if width is not None:
        terminal = Terminal(file=stream, width=width, force_terminal=True, color_system=None)
    console = Console(total_steps, terminal=terminal, clock=clock)
    for record in records:
        console.observe(record)
        clock.seconds += seconds
    return stream.getvalue()


def lines(records: Sequence[Record], *, total_steps: int | None = None, seconds: float = 1.0) -> list[str]:
    """Return the lines of a run in a pipe, without repeated spaces."""
    return [re.sub(" +", " ", line) for line in shown(records, total_steps=total_steps, seconds=seconds).splitlines()]


def test_lines_of_a_run() -> None:
    """Without a terminal, lines show the run, the first step, a step every five seconds, the last step and the end."""
    printed = lines(list(whole_run(12)), total_steps=12)

    assert printed[:3] == [
        "64 samples = 2 ranks x 2 micro-batches x 16",
        "cpu, precision fp32, 1,234 parameters of float32, gradients of 4.82 KiB, strategy all_reduce",
        "anybatch 0.1.0, torch 2.13.0",
    ]
    assert [line[:10] for line in printed[3:-1]] == ["step 1 of ", "step 6 of ", "step 11 of", "step 12 of"]
    assert printed[4] == (
        "step 6 of 12 loss 0.333 gradient norm 1.25 learning rate 0.00100 samples/s 64.0 epoch 1 time 6.0 s left 6.0 s"
    )
    assert printed[-1] == "completed after 13 s, 12 steps"


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (
            evaluation(40, accuracy=0.91234, loss=torch.tensor(float("nan"))),
            "step 40 of 100 evaluation of 1,000 samples: accuracy 0.912, loss NaN",
        ),
        (
            out_of_memory(39),
            (
                "step 40 of 100 warning: out of memory in forward and backward: "
                "micro-batch 16 -> 8 samples, repeating the step"
            ),
        ),
        (diagnosis("two samples [bold]are equal[/bold]"), "warning: two samples [bold]are equal[/bold]"),
        (
            diagnosis("found 3", step=39, level="info", remedy="Look again."),
            "step 40 of 100 note: found 3. Look again.",
        ),
        (end(40), "completed, 40 steps"),
        (end(40, status="failed", message="reported by the caller"), None),
        (checkpoint(40), None),
        (start(rank=1), None),
        (PhaseRecord(rank=0, event="begin", step=0, name="clip", position=None), None),
        (type("Unknown", (), {"rank": 0, "kind": "unknown"})(), None),
    ],
)
def test_events(record: Record, line: str | None) -> None:
    """Each event of rank 0 is one sentence, with steps counted from 1; saved checkpoints and failures are silent."""
    assert lines([record], total_steps=100) == ([] if line is None else [line])


def test_skipped_steps_warn_once() -> None:
    """Skipped steps are listed in one warning, also if their flags are tensors on a device."""
    flags = (False, True, torch.tensor(True), torch.tensor(False), torch.tensor(True))
    printed = lines([start(), *(step(n, skipped=flag) for n, flag in enumerate(flags)), end(5)], seconds=0.01)

    (warning,) = [line for line in printed if "warning" in line]
    assert warning.endswith("update skipped, because the gradient was not finite, in 3 steps: 2, 3, 5")


def test_rate_and_time_left() -> None:
    """Samples per second exclude evaluations; the time left includes them."""
    records: list[Record] = [start(), step(0), step(1), step(2), evaluation(3), step(3)]
    last = shown(records, total_steps=13, seconds=2.0, width=200).rpartition("step  4 of 13")[2]

    assert " 24 s left" in last  # 9 steps left, and the last 3 took 8 s with the evaluation
    assert re.search(r"samples/s +32\.0", last)


@pytest.mark.parametrize(
    ("records", "numbers"),
    [
        (
            [start(), step(0, torch.tensor(float("nan")), gradient_norm=torch.tensor(0.0, device="meta"))],
            ("loss NaN", "gradient norm -"),
        ),
        (
            [start(), step(0, 2.5, losses={"reconstruction_of_the_image": 2.0, "kl": 0.5}, learning_rates=(0.1, 0.01))],
            ("loss 2.50", "recons..image 2.00", "kl 0.500", "highest rate 0.100", "lowest rate 0.0100"),
        ),
        ([start(), memory(0, peak_bytes=2**30, limit_bytes=2**33), step(0)], ("memory 1.00 of 8.00 GiB",)),
    ],
)
def test_numbers(records: list[Record], numbers: tuple[str, ...]) -> None:
    """NaN, lost devices, several terms and rates, and memory are shown."""
    assert all(number in lines(records)[-1] for number in numbers)


def test_the_loop_does_not_wait() -> None:
    """Tensors are read only for steps that are shown."""
    loss = counting(0.5)
    shown([start(), *(step(number, loss) for number in range(100)), end(100)], seconds=0.05, width=80)

    assert 15 <= CountingTensor.num_read <= 5 / 0.25 + 3  # 100 steps in 5 s, shown every 0.25 s


def test_progress_within_a_step() -> None:
    """Micro-batches move the bar within a step; without a terminal, a long step prints a line every half minute."""
    long: list[Record] = [start(), step(0, num_micro_batches=100)]
    long += [micro_batch(1, position, num_micro_batches=100) for position in range(100)]
    printed = [line.split(" left")[0] for line in lines(long, total_steps=2) if "micro-batch" in line]
    assert printed[1:] == [f"step 1 of 2 micro-batch {number} of 100" for number in (30, 60, 90)]

    records: list[Record] = [start(), *(micro_batch(0, half // 2, ("begin", "end")[half % 2]) for half in range(8))]
    text = shown([*records, step(0, num_micro_batches=4)], total_steps=2, width=80)

    shares = re.findall(r"([\d.]+) %", text)
    assert list(dict.fromkeys(shares)) == ["0.0", "12.5", "25.0", "37.5", "50.0"]
    assert "4 of 4" in text


def test_a_terminal_is_restored() -> None:
    """The cursor is hidden while the bar is shown, and restored at the end and on close."""
    finishes: list[Callable[[Console], None]] = [lambda console: console.observe(end(1)), Console.close]
    for finish in finishes:
        stream = io.StringIO()
        console = Console(1, terminal=Terminal(file=stream, width=80, force_terminal=True))
        for record in (start(), step(0)):
            console.observe(record)
        assert [stream.getvalue().count(code) for code in ("\x1b[?25l", "\x1b[?25h")] == [1, 0]
        finish(console)
        assert [stream.getvalue().count(code) for code in ("\x1b[?25l", "\x1b[?25h")] == [1, 1]


def test_stop_is_shown_above_the_bar() -> None:
    """On a terminal the stop request is reported once, and not before it was made."""
    stream, asked = io.StringIO(), [False]
    terminal = Terminal(file=stream, width=80, force_terminal=True)
    console = Console(3, terminal=terminal, stop_requested=lambda: asked[0])
    console.observe(step(0))
    assert "stopping after this step" not in stream.getvalue()

    asked[0] = True
    console.observe(step(1))
    console.observe(step(2))
    assert stream.getvalue().count("stopping after this step and saving") == 1


def test_a_pipe_gets_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines for a pipe have no control characters, even where colors or interaction are forced."""
    for name in ("FORCE_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE"):
        monkeypatch.setenv(name, "1")
    printed = lines([*whole_run(3), diagnosis("look at " + "a long line " * 40)])

    assert all(line.isprintable() for line in printed)
    assert printed[-1].strip().endswith("long line")


@pytest.mark.parametrize("error", [BrokenPipeError, ValueError])
def test_a_lost_stream_does_not_end_the_run(error: type[Exception]) -> None:
    """If its stream fails, the console stops printing, and the run continues."""

    class Lost(io.StringIO):
        num_tried = 0

        def write(self, _text: str, /) -> int:
            self.num_tried += 1
            raise error

    stream = Lost()
    console = Console(2, terminal=terminal_on(stream))
    for record in whole_run(2):
        console.observe(record)
    assert stream.num_tried == 1


def test_unsupported_characters_are_escaped() -> None:
    """Characters outside of the terminal's encoding are escaped, and the bar is drawn in ASCII."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", errors="strict")
    terminal = Terminal(file=SafeStream(stream), width=80, force_terminal=True, color_system="standard")  # type: ignore[arg-type]
    with Console(2, terminal=terminal) as console:
        for record in (start(), step(0), evaluation(1, μ=0.5)):
            console.observe(record)
    text = raw.getvalue()

    assert b"\\u03bc 0.500" in text
    assert b"---" in text
