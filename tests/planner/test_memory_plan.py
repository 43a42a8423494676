"""Memory planned on fake tensors matches the real engine, and steps that cannot be planned raise."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.profiler import record_function

import anybatch as ab
from anybatch.engine.arguments import Hardware, TrainSpec
from anybatch.errors import CannotPlanError, PlanError
from anybatch.memory.ledger import MemoryLedger
from anybatch.memory.trace import MemoryEnvelope, fit
from anybatch.planner import refusals
from anybatch.planner.budget import Budget
from anybatch.planner.cuda_emulation import Profile
from anybatch.planner.envelopes import Envelopes, find_envelopes
from anybatch.planner.fit import Fit, PlanTarget, fit_of
from anybatch.planner.step_spec import NUM_MICRO_BATCHES, StepSpec, built
from anybatch.planner.step_trace import trace_step
from tests.planner.step_specs import changed, step_spec

Batch = dict[str, torch.Tensor]


class Words(nn.Module):
    """Attention over tokens, with a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, activation="gelu", batch_first=True)
        self.head = nn.Linear(32, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.block(self.embed(ids)))
        return logits


def of_words(model: Any, batch: Batch) -> Any:
    """Return the mean cross-entropy over tokens."""
    return functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["x"].flatten())


def of_numbers(model: Any, batch: Batch) -> Any:
    """Return a mean over samples."""
    return model(batch["x"]).square().mean()


def of_first_output(model: Any, batch: Batch) -> Any:
    """Return a mean over samples of the first of several outputs."""
    return model(batch["x"])[0].square().mean()


def of_two_words(model: Any, batch: Batch) -> Any:
    """Return a mean over samples of products of two embeddings."""
    return (model(batch["x"][:, 0]) * model(batch["x"][:, 1])).mean()


def perceptron() -> nn.Module:
    """Return a model of vectors of 16."""
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


def pictures() -> nn.Module:
    """Return a model of images of 8 x 8, with BatchNorm."""
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten(), nn.Linear(8 * 36, 4))


def adamw(named: Any) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(named, lr=1e-3)


def momentum(named: Any) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(named, lr=1e-2, momentum=0.9)


def numbers(count: int) -> Batch:
    """Return vectors of 16."""
    return {"x": torch.randn(count, 16)}


def small(profile: Profile = "cpu", **options: Any) -> StepSpec:
    """Return the spec of a step of the perceptron, changed by options."""
    defaults: dict[str, Any] = {"model": perceptron, "optimizer": adamw, "loss": ab.mean_over_samples(of_numbers)}
    return step_spec(**{**defaults, "sample": numbers(1), "profile": profile, "rng": None, **options})


CASES: dict[str, tuple[StepSpec, Callable[[int], Batch]]] = {
    "words": (
        small(model=Words, loss=ab.mean_over_tokens(of_words, labels="x", shift=False), clip=1.0),
        lambda count: {"x": torch.randint(40, (count, 12))},
    ),
    "pictures": (small(model=pictures, optimizer=momentum), lambda count: {"x": torch.randn(count, 3, 8, 8)}),
    "a recurrent layer": (
        small(model=lambda: nn.GRU(16, 8, batch_first=True), loss=ab.mean_over_samples(of_first_output)),
        lambda count: {"x": torch.randn(count, 5, 16)},
    ),
    "a table used twice": (
        small(model=lambda: nn.Embedding(40, 12), loss=ab.mean_over_samples(of_two_words), optimizer=momentum),
        lambda count: {"x": torch.randint(40, (count, 2))},
    ),
    "bf16, average": (small(precision="bf16", average_decay=0.9, rng="micro_batch"), numbers),
}


def run(spec: StepSpec, batch: Batch, micro_batch_size: int) -> MemoryLedger:
    """Run two steps of the real engine; return the ledger, with marks around the second."""
    make = spec.train
    assert not isinstance(make, TrainSpec)
    with MemoryLedger() as ledger:
        engine = ab.Engine.from_spec(
            dataclasses.replace(make(), check_loss=False, norms="keep"),
            Hardware(micro_batch_size=micro_batch_size, world=ab.World()),
        )
        # The batch counts as memory: it exists before the step.
        ledger.categorize("inputs", batch.values())
        engine.step(batch)
        ledger.mark("second")
        with record_function("second step"):
            engine.step(batch)
        engine.close()
    return ledger


def real_peak(spec: StepSpec, batch: Batch, micro_batch_size: int) -> int:
    """Return the peak of tensor memory in the real engine's second step."""
    trace = run(spec, batch, micro_batch_size).trace()
    (start,) = [place for place, name in trace.marks if name == "second"]
    held, most = 0, 0
    for place, event in enumerate(trace.events, start=1):
        held += trace.allocations[abs(event) - 1].num_bytes * (1 if event > 0 else -1)
        most = max(most, held) if place >= start else 0
    return most


def planned(spec: StepSpec) -> MemoryEnvelope:
    """Return the envelope of a step after the first, from micro-batches of 2 and 3."""
    return fit(trace_step(spec, 2).steady, 2, trace_step(spec, 3).steady, 3)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_the_plan_matches_the_real_engine(name: str) -> None:
    """The peak of a step, extrapolated from micro-batches of 2 and 3, matches the real engine exactly."""
    spec, batch = CASES[name]
    envelope = planned(dataclasses.replace(spec, sample=batch(1)))

    for size in (5, 9):
        assert envelope.peak_bytes(size) == real_peak(spec, batch(NUM_MICRO_BATCHES * size), size)


def test_categories_have_their_sizes() -> None:
    """At the peak, weights, gradients, optimizer state and inputs have their expected sizes."""
    spec = small(optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3))
    envelope = planned(spec)
    weights = sum(parameter.nbytes for parameter in perceptron().parameters())

    found = envelope.at_peak(1000).by_category

    assert found["weights"] == weights
    assert found["gradients"] == weights
    assert found["optimizer"] == 2 * weights + 4 * 4
    assert found["inputs"] == NUM_MICRO_BATCHES * 1000 * 16 * 4
    assert envelope.at_peak(1000).phase == "backward"
    assert envelope.at_peak(1).phase == "update"


def test_an_update_in_fp16_is_planned() -> None:
    """The fp16 loss scaler reads whether gradients overflowed; the plan assumes that they did not."""
    weights = sum(parameter.nbytes for parameter in perceptron().parameters())

    step = trace_step(small(precision="fp16"), 2)

    assert any(one.phase == "update" and one.num_bytes >= 64 * 16 * 4 for one in step.steady.allocations)
    assert sum(one.num_bytes for one in step.steady.allocations if one.category == "optimizer") > 2 * weights


def test_tracing_changes_nothing() -> None:
    """Planning changes no value, state, mode or random state of the model and optimizer passed to it.

    It creates no real tensor of the model's size and leaves no process group.
    """
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters())
    model.eval()
    spec = small(model=model, optimizer=optimizer, strategy="ddp", world_size=4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    real: list[int] = []

    def note(*seen: Any) -> None:
        result = seen[3]
        if isinstance(result, torch.Tensor) and not isinstance(result, FakeTensor):
            real.append(result.nbytes)

    with MemoryLedger(on_operation=note):
        trace_step(spec, 2)

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state
    assert not model.training
    assert torch.equal(torch.get_rng_state(), random)
    assert max(real, default=0) < 64 * 16 * 4
    assert not dist.is_initialized()


@pytest.mark.slow
def test_ranks_are_simulated() -> None:
    """DDP holds gradient buckets in addition to gradients; `all_reduce` accumulates gradients in its buckets."""
    weights = sum(parameter.nbytes for parameter in perceptron().parameters())
    peaks = {}
    for strategy, size in (("single", 1), ("all_reduce", 2), ("ddp", 2)):
        envelope = planned(small(strategy=strategy, world_size=size))
        peaks[strategy] = envelope.at_peak(64).by_category["gradients"]

    assert peaks["single"] == weights
    assert 0 <= peaks["all_reduce"] - weights < 200  # the values sent with gradients
    assert weights < peaks["ddp"] - weights < weights + 200


def test_a_joint_loss_is_planned_for_all_rows() -> None:
    """A joint loss is planned for all its rows, though two micro-batches are traced.

    The plan is never below the real engine with eight, and above it by less than the outputs of four micro-batches.
    """

    def across(_: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(rows @ rows.T, torch.arange(len(rows)))

    loss = ab.joint(lambda model, batch: model(batch["x"]), across)
    spec = small(loss=loss, effective_batch_size=48, rng="micro_batch")
    envelope = planned(spec)

    found, expected = envelope.peak_bytes(6), real_peak(spec, numbers(48), 6)

    # A CPU holds the whole batch, of which the plan counts two micro-batches.
    inputs = (48 - NUM_MICRO_BATCHES * 6) * 16 * 4
    assert expected <= found + inputs <= expected + 4 * 6 * 16 * 4
    with pytest.raises(PlanError, match="effective_batch_size"):
        trace_step(changed(spec, effective_batch_size=None), 2)


def target(num_bytes: int, *, headroom: float = 0.0, max_samples: int = 10**9) -> PlanTarget:
    """Return a device whose memory is all available to tensors."""
    budget = Budget(total_bytes=num_bytes, device=None, headroom=headroom, outside_bytes=0, workspace_bytes=0)
    return PlanTarget(budget=budget, effective_batch_size=max_samples)


def fitting(spec: StepSpec, num_bytes: int) -> tuple[Envelopes, Fit]:
    """Return the envelopes of a spec and its largest fit."""
    envelopes = find_envelopes(spec, num_bytes)
    return envelopes, fit_of(spec, envelopes, target(num_bytes))


@pytest.mark.slow
def test_the_size_found_is_the_largest() -> None:
    """The real engine fits into the budget at the planned size, but not with one more sample."""
    spec = small()
    budget = 2**20

    envelopes, plan = fitting(spec, budget)

    size = plan.largest
    assert real_peak(spec, numbers(NUM_MICRO_BATCHES * size), size) <= budget
    assert real_peak(spec, numbers(NUM_MICRO_BATCHES * (size + 1)), size + 1) > budget
    assert plan.limit == "tensors"
    assert fit_of(spec, envelopes, target(budget, headroom=0.5)).largest < size // 2
    assert fit_of(spec, envelopes, target(budget, max_samples=7)).limit == "batch"
    assert fit_of(spec, envelopes, target(1000)).largest == 0


def test_the_allocator_needs_more_than_the_tensors() -> None:
    """On CUDA, the size is the largest the allocator can serve, at most the one by tensor sizes."""
    envelopes, plan = fitting(small("cuda"), 8 * 2**20)

    assert 0 < plan.largest == envelopes.largest_allocated(8 * 2**20)
    assert plan.largest < (envelopes.largest(8 * 2**20) or 0)
    assert plan.peak.num_bytes < plan.reserved_bytes <= 8 * 2**20
    assert plan.limit == "allocator"


def pairs(model: Any, batch: Batch) -> Any:
    """Compare all pairs of samples."""
    rows = model(batch["x"])
    return (rows @ rows.T).square().mean()


def masked(model: Any, batch: Batch) -> Any:
    """Select rows by a value."""
    rows = model(batch["x"])
    return rows[rows[:, 0] >= rows[:, 0].median()].square().mean()


def reading(model: Any, batch: Batch) -> Any:
    """Select a number of columns that depends on a value."""
    rows = model(batch["x"])
    length = 1 + int(abs(rows.sum().item()))
    return rows[:, :length].exp().square().mean()


def branching(model: Any, batch: Batch) -> Any:
    """Run another operation if all values are positive."""
    rows = model(batch["x"])
    if (rows > 0).all():
        rows = rows.exp()
    return rows.square().mean()


def by_size(model: Any, batch: Batch) -> Any:
    """Run another operation for more than eight samples."""
    rows = model(batch["x"])
    return (rows.exp() if len(rows) > 8 else rows).square().mean()


class Deciding(nn.Module):
    """Branches on its values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.layer(x)
        return rows.exp() if bool((rows > 0).all()) else rows


def sometimes(model: Any, batch: Batch) -> Any:
    """Run another operation at random."""
    rows = model(batch["x"])
    return (rows if torch.rand([]) < 0.1 else rows.exp()).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "loss", "words"),
    [
        (perceptron, by_size, "run different operations"),
        (perceptron, lambda model, _: model.missing, r"AttributeError.*Real data probably raises"),
    ],
)
def test_steps_that_cannot_be_planned_are_refused(model: Any, loss: Any, words: str) -> None:
    """Steps with other operations at another size, and mistakes in the code, raise."""
    with pytest.raises(CannotPlanError, match=words) as caught:
        find_envelopes(small(model=model, loss=ab.mean_over_samples(loss)), 2**20)

    assert str(caught.value).startswith("cannot plan this step: ")


@pytest.mark.slow
def test_a_step_that_is_too_large_to_run_is_planned_without_data() -> None:
    """Reads get a made-up value, with a note of the module and line; shapes that depend on data are refused."""
    ready, _ = built(small(model=Deciding, loss=ab.mean_over_samples(of_numbers)))
    envelopes = find_envelopes(dataclasses.replace(ready, make=None), 2**20)

    assert re.search(r"reads the value of a tensor, in Deciding at test_memory_plan.py:\d+, `", envelopes.notes[0])
    ready, _ = built(small(loss=ab.mean_over_samples(masked)))
    with pytest.raises(CannotPlanError, match="DynamicOutputShape"):
        find_envelopes(dataclasses.replace(ready, make=None), 2**20)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [masked, reading, branching, sometimes])
def test_sizes_that_depend_on_data_come_from_the_sample(loss: Any) -> None:
    """A step that depends on data runs with the sample, which the user's generators do not notice."""
    spec = small(loss=ab.mean_over_samples(loss), sample={"x": torch.randn(4, 16)})
    before = torch.get_rng_state()
    envelopes = find_envelopes(spec, 2**20)
    live = trace_step(built(spec)[0], len(spec.sample["x"]), with_data=True).steady.peak_bytes

    assert torch.equal(before, torch.get_rng_state())
    assert loss is sometimes or "measured with your sample" in envelopes.notes[-1]
    assert envelopes.steady.peak_bytes(len(spec.sample["x"])) == pytest.approx(live, rel=0.1)


@pytest.mark.slow
def test_memory_that_is_not_linear_is_planned_for_its_size() -> None:
    """Memory of all pairs of samples is exact at the planned size, with a note."""
    spec = small(loss=ab.mean_over_samples(pairs))
    envelopes = find_envelopes(spec, 2**24, max_samples=64, max_size=24)

    assert "does not grow linearly" in envelopes.notes[-1]
    assert envelopes.steady.peak_bytes(24) == trace_step(spec, 24).steady.peak_bytes


@pytest.mark.slow
def test_a_loop_over_very_many_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that loops over its tokens can be planned; a step with too many operations raises."""

    def one_by_one(model: Any, batch: Batch) -> Any:
        state = batch["x"][:, 0]
        for _ in range(20):
            state = model(state)
        return state.square().mean()

    spec = step_spec(
        lambda: nn.Linear(4, 4),
        optimizer=lambda named: torch.optim.SGD([one for _, one in named], lr=0.1),
        loss=one_by_one,
        sample={"x": torch.zeros(1, 3, 4)},
        strategy="single",
    )
    assert find_envelopes(spec, 1 << 30).largest(1 << 30)

    monkeypatch.setattr(refusals, "MAX_OPERATIONS", 60)
    with pytest.raises(CannotPlanError):
        find_envelopes(spec, 1 << 30)
