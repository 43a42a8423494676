"""Memory numbers of the guide equal independent counts of tensors, and its out-of-memory errors are real."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anybatch.memory.trace import ORDER, timeline
from anybatch_guide.experiments import memory_accumulation, memory_limit, split_times
from anybatch_guide.memory.accumulated import AccumulationConfig, measure_accumulated
from anybatch_guide.memory.plain_step import trace_plain_step, try_plain_step
from anybatch_guide.memory.small import ACCUMULATED, SMALL_MODELS, TRANSFORMER, SmallModel
from anybatch_guide.memory.timelines import downsampled, in_order, peak_of

PLAIN = AccumulationConfig(optimizer="adamw", precision="fp32", checkpointing=False)
MODELS = pytest.mark.parametrize("model", SMALL_MODELS.values(), ids=lambda model: model.name)


def num_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes of tensors without shared storage."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def silent(_line: object) -> None:
    """Ignore the event."""


@MODELS
def test_memory_between_steps_matches_tensor_sizes(model: SmallModel) -> None:
    """Memory between steps is weights, buffers, inputs and AdamW's two moments and step counts, by their shapes."""
    made = model.make()
    held = timeline(trace_plain_step(model, 4)).at(0)
    parameters = list(made.parameters())
    assert held["weights"] == num_bytes(parameters)
    assert held.get("buffers", 0) == num_bytes(list(made.buffers()))
    assert held["optimizer"] == 2 * num_bytes(parameters) + 4 * len(parameters)
    assert held["inputs"] == num_bytes(list(model.batch(4).values()))
    assert held.get("gradients", 0) == 0


@MODELS
def test_a_step_runs_out_of_memory_exactly_below_its_peak(model: SmallModel) -> None:
    """A budget of the counted peak is enough; one byte less raises torch's error, in the phase of the peak."""
    measured = timeline(trace_plain_step(model, 12))
    assert try_plain_step(model, 12, measured.peak_bytes) is None
    shortage = try_plain_step(model, 12, measured.peak_bytes - 1)
    assert shortage is not None
    assert shortage.phase == measured.phases[measured.peak_moment]
    assert shortage.message.startswith("Tried to allocate")
    assert sum(shortage.category_bytes.values()) < measured.peak_bytes


@pytest.mark.slow
def test_the_largest_size_runs_and_the_next_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results for a budget hold for real steps, and predicted peaks equal counted ones."""
    monkeypatch.setattr(memory_limit, "SIZES", (1, 2, 4, 8, 16))
    monkeypatch.setattr(memory_limit, "BUDGETS_MIB", (8,))
    monkeypatch.setattr(memory_limit, "SMALL_MODELS", {"transformer": TRANSFORMER})
    data = memory_limit.run(silent)
    (model,) = data["models"]
    (budget,) = model["budgets"]
    assert try_plain_step(TRANSFORMER, budget["largest"], 8 * 2**20) is None
    assert try_plain_step(TRANSFORMER, budget["largest"] + 1, 8 * 2**20) is not None
    # a single sample is special: PyTorch sums dimensions of length 1 differently
    assert model["predicted"][1:] == [peak["num_bytes"] for peak in model["peaks"][1:]]
    assert [shortage is None for shortage in budget["shortages"]] == [
        size <= budget["largest"] for size in (1, 2, 4, 8, 16)
    ]
    for peak in model["peaks"]:
        assert sum(peak["held"]) == peak["num_bytes"]


@pytest.mark.slow
def test_accumulation_needs_one_more_copy_of_gradients() -> None:
    """4 x 16 against 16 alone: gradients differ by one copy, inputs by the waiting samples, the rest by a few sums."""
    many = measure_accumulated(ACCUMULATED, PLAIN, effective_batch_size=64, micro_batch_size=16)
    one = measure_accumulated(ACCUMULATED, PLAIN, effective_batch_size=16, micro_batch_size=16)
    peaks = (in_order(step.timeline.at(step.timeline.peak_moment)) for step in (one, many))
    gained = {name: after - before for name, before, after in zip(ORDER, *peaks, strict=True)}
    copy = sum(4 * parameter.numel() for parameter in ACCUMULATED.make().parameters())
    assert gained["gradients"] == many.gradient_bytes == copy
    waiting = num_bytes(list(ACCUMULATED.batch(64).values())) - num_bytes(list(ACCUMULATED.batch(16).values()))
    assert gained["inputs"] == waiting
    assert sum(gained.values()) - copy - waiting < 64  # the sums of losses and counts


def test_the_peak_survives_downsampling() -> None:
    """The points include the peak with its bytes by category, and only measured moments."""
    measured = measure_accumulated(ACCUMULATED, PLAIN, effective_batch_size=8, micro_batch_size=2).timeline
    picture = downsampled(measured, 20)
    moments = torch.tensor(picture["moments"]).cumsum(0)
    held = [torch.tensor(row).cumsum(0).expand(len(moments)) for row in picture["held"]]
    totals = torch.stack(held).sum(0)
    assert int(totals.max()) == measured.peak_bytes == peak_of(measured)["num_bytes"]
    assert totals.tolist() == measured.totals[moments].tolist()
    assert len(moments) <= 41


@pytest.mark.slow
def test_waiting_samples_add_their_inputs_and_passes_their_operations() -> None:
    """The page calculates other effective batches from 64: 128 samples in micro-batches of 16 are counted here."""
    small, usual, large = (
        measure_accumulated(ACCUMULATED, PLAIN, effective_batch_size=effective, micro_batch_size=16)
        for effective in (32, 64, 128)
    )
    waiting = num_bytes(list(ACCUMULATED.batch(64).values()))
    extra = large.timeline.peak_bytes - usual.timeline.peak_bytes - waiting
    assert 0 <= extra < 64  # the sums of losses
    assert large.num_operations - usual.num_operations == 2 * (usual.num_operations - small.num_operations)


def test_progress_only_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The progress of the longest experiment counts all its steps once, without starting again."""
    step = SimpleNamespace(timeline=None, gradient_bytes=1, num_operations=1)
    monkeypatch.setattr(memory_accumulation, "measure_accumulated", lambda *_, **__: step)
    monkeypatch.setattr(memory_accumulation, "peak_of", lambda _: {})
    monkeypatch.setattr(memory_accumulation, "downsampled", lambda *_: {})
    lines: list[Mapping[str, Any]] = []
    memory_accumulation.measure_peaks(lines.append)

    assert [line["done"] for line in lines] == list(range(len(lines)))
    assert {line["of"] for line in lines} == {len(lines)}


def test_times_are_medians_of_interleaved_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round times every split once; a recorded time is the median over rounds, so one slow round has no effect."""
    clock, made = [0.0], []

    def step(engine: Any) -> None:
        made.append(engine.micro_batch_size)
        clock[0] += 100.0 if len(made) < 5 else 64 / engine.micro_batch_size

    monkeypatch.setattr(split_times, "MICRO_SIZES", (64, 16))
    monkeypatch.setattr(split_times, "ROUNDS", 3)
    monkeypatch.setattr(split_times, "all_configs", lambda: (PLAIN,))
    monkeypatch.setattr(split_times, "_step", step)
    monkeypatch.setattr(split_times, "engine_of", lambda *_, **sizes: nullcontext(SimpleNamespace(**sizes)))
    monkeypatch.setattr("time.process_time", lambda: clock[0])
    data = split_times.run(silent)

    assert data["ways"][0]["seconds"] == [1.0, 4.0]
    assert made == [64, 16] * 4  # once to create the optimizer state, and three rounds
