"""The playground's memory limit, its BatchNorm policies, and the details of single micro-batches."""

import threading
from contextlib import suppress
from typing import Any

import pytest
import torch

from anybatch import in_trial_run
from anybatch_guide.micro_batch_view import MicroBatchView
from anybatch_guide.mistakes.windows import share
from anybatch_guide.playground import PlaygroundSetting, run
from anybatch_guide.tasks.task import MicroBatches, cross_entropy, load
from anybatch_guide.training import make
from anybatch_guide.worker import CancelledError, Gate
from guide.tests.test_playground import SHORT, Line, of_kind, played
from tests.extras import skip_without

skip_without("sklearn", "anybatch[guide]")

WIDE: dict[str, Any] = {"micro_batch_size": 64, "accumulation_steps": 2, "steps": 3}


@pytest.mark.slow
def test_a_limit_makes_micro_batches_smaller() -> None:
    """With a limit, losses and first gradient stay the same, in smaller parts, within the limit."""
    limited, lines = played(**WIDE, memory_limit_kib=2048)
    free, _ = played(**WIDE)
    told = [
        (line["micro_batch_size_before"], line["micro_batch_size_after"]) for line in of_kind(lines, "out_of_memory")
    ]

    assert free["peak_bytes"] > 2048 * 2**10 >= limited["peak_bytes"]
    assert told == [(64, 32), (32, 16)]
    assert limited["smaller_sizes"] == [32, 16]
    assert free["smaller_sizes"] == []
    assert limited["losses"] == pytest.approx(free["losses"], rel=1e-5)
    assert limited["first_update_difference"] < 1e-5


def test_a_pause_during_the_loss_checks_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that arrives while the engine checks the loss still pauses the run, and a cancellation ends it.

    The hooks of the micro-batch view reach the gate, and in a clone the guide is the user's code, not a library.
    """
    gate, checking, lines = Gate(paused=False), threading.Event(), []
    begin = MicroBatchView.begin

    def pausing_begin(view: MicroBatchView, inputs: torch.Tensor) -> None:
        if in_trial_run() and not checking.is_set():
            commands = threading.Thread(target=gate.set, args=("pause",))
            commands.start()
            commands.join()
            checking.set()
        begin(view, inputs)

    monkeypatch.setattr(MicroBatchView, "begin", pausing_begin)

    def emit(line: Line) -> None:
        gate.wait_before(line)
        lines.append(line)

    def work() -> None:
        with suppress(CancelledError):
            run(PlaygroundSetting(**SHORT), emit, is_stepped=gate.is_stepped)

    runner = threading.Thread(target=work)
    runner.start()
    assert checking.wait(60)
    runner.join(3)
    assert runner.is_alive()
    assert gate.is_stepped()
    assert len(of_kind(lines, "step")) < SHORT["steps"]
    gate.set("cancel")
    runner.join(60)
    assert not runner.is_alive()
    assert lines[-1]["kind"] != "end"


def seen(setting: PlaygroundSetting) -> list[Line]:
    """Return the details of each micro-batch of the first step."""
    lines: list[Line] = []
    run(setting, lines.append, is_stepped=lambda: True)
    return [line for line in of_kind(lines, "guide.micro_batch") if line["step"] == 0]


@pytest.mark.parametrize("task", ["digits", "shapes", "spirals"])
def test_micro_batch_details_match_autograd(task: Any) -> None:
    """The details of a micro-batch equal the plainly computed gradient of its share of the loss, and their sum."""
    setting = PlaygroundSetting(**{**SHORT, "steps": 1}, task=task)
    data = load(task)
    model = make(setting, data)[0]
    weight = [parameter for parameter in model.parameters() if parameter.dim() > 1][-1]
    places = torch.linspace(0, weight.numel() - 1, min(48, weight.numel())).round().long()
    window = [pair for pair, _ in zip(MicroBatches(data.rows, 4, setting.seed), range(4), strict=False)]
    total = torch.zeros(len(places))
    for line, (inputs, targets) in zip(seen(setting), window, strict=True):
        (own,) = torch.autograd.grad(cross_entropy(model(inputs), targets) * share(targets, window), weight)
        total += own.flatten()[places]

        torch.testing.assert_close(torch.tensor(line["gradient"]), own.flatten()[places], rtol=1e-3, atol=1e-7)
        torch.testing.assert_close(torch.tensor(line["sum"]), total, rtol=1e-3, atol=1e-6)
        assert line["num_samples"] == 4
