"""A plan's largest size, what uses the memory, and the changes it proposes."""

import dataclasses
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import anybatch as ab
from anybatch.engine.arguments import TrainSpec
from anybatch.errors import UserError
from anybatch.planner import fit
from anybatch.planner.budget import budget_of
from anybatch.planner.caching_allocator import largest_that_fits
from anybatch.planner.changes import changed as with_changes
from anybatch.planner.changes import possible_changes
from anybatch.planner.envelopes import find_envelopes
from anybatch.planner.fit import PlanTarget, fit_of, propose
from anybatch.planner.plan import Plan, draw_plan, make_plan
from anybatch.planner.trace.step_spec import Keeping, StepSpec, checkpoint_blocks
from anybatch.planner.trace.step_trace import trace_step
from tests.planner.step_specs import changed, step_spec

VOCABULARY, TIME, WIDTH = 8192, 1024, 16
MIB = 2**20


class Block(nn.Module):
    """Two layers and a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.down(F.gelu(self.up(x)))
        return x + added


class Net(nn.Module):
    """Blocks and a head."""

    def __init__(self, num_blocks: int = 4, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Language(nn.Module):
    """A language model with its loss in one piece, or in checkpointed chunks."""

    def __init__(self, chunk: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.chunk = chunk

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        x = torch.tanh(self.embedding(tokens)).flatten(0, 1)
        if self.chunk is None:
            return F.cross_entropy(self.head(x), tokens.flatten())
        pairs = zip(x.split(self.chunk), tokens.flatten().split(self.chunk), strict=True)
        sums = [checkpoint(self._sum, part, targets, use_reentrant=False) for part, targets in pairs]
        return torch.stack(sums).sum() / tokens.numel()

    def _sum(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), targets, reduction="sum")


def classes(model: nn.Module, batch: Tensor) -> Tensor:
    """Return a mean over samples."""
    return F.cross_entropy(model(batch), torch.zeros(len(batch), dtype=torch.int64))


def language(model: Language, batch: Tensor) -> Tensor:
    """Return a mean over tokens, which equals the mean over samples of equal length."""
    return model.loss(batch)


def adamw(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """Return an optimizer with state."""
    return torch.optim.AdamW([parameter for _, parameter in named])


def spec_of_classes(num_blocks: int = 4, width: int = 32) -> StepSpec:
    """Return a spec with negligible logits."""
    return step_spec(
        partial(Net, num_blocks, width),
        optimizer=adamw,
        loss=ab.mean_over_samples(classes),
        sample=torch.zeros(1, width),
    )


def spec_of_language(chunk: int | None = None) -> StepSpec:
    """Return a spec whose memory is mostly logits."""
    return step_spec(
        partial(Language, chunk),
        optimizer=adamw,
        loss=ab.mean_over_samples(language),
        sample=torch.zeros(1, TIME, dtype=torch.int64),
    )


def planned(spec: StepSpec, device: str, size: int, *, proposals: bool = False) -> Plan:
    """Return a plan without headroom."""
    return make_plan(spec, budget_of(device, headroom=0.0), size, name="net", proposals=proposals)


@pytest.mark.parametrize("keeping", ["inputs", "products"])
def test_checkpointed_blocks_give_the_same_gradient(keeping: Keeping) -> None:
    """A checkpointed block has the gradient of the plain block."""
    gradients = []
    for change in (False, True):
        torch.manual_seed(0)
        model = Net()
        if change:
            checkpoint_blocks(model, keeping)
        classes(model, torch.randn(8, 32)).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])

    for one, other in zip(*gradients, strict=True):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("keeping", ["inputs", "products"])
@pytest.mark.slow
def test_checkpointing_is_planned_as_it_is(keeping: Keeping) -> None:
    """The planned memory of a checkpointing change matches a model that was built with it."""
    spec = spec_of_classes()
    names = {"inputs": "checkpointing", "products": "checkpointing all but products"}
    change = next(one for one in possible_changes(spec) if one.name == names[keeping])
    by_hand_spec = changed(spec, model=lambda: checkpoint_blocks(Net(), keeping))

    specs = (spec, with_changes(spec, [change]), by_hand_spec)
    plain, proposed, by_hand = (trace_step(one, 64).steady.peak_bytes for one in specs)

    assert proposed == by_hand
    assert proposed < plain


@pytest.mark.slow
def test_loss_in_chunks_is_planned_as_by_hand() -> None:
    """A chunked loss is planned within 15% of one written by hand, and takes less than a third of the memory."""
    spec = spec_of_language()
    change = next(one for one in possible_changes(spec) if one.name.startswith("loss in chunks"))
    envelope = find_envelopes(spec, 2**30).steady
    assert change.reshape is not None

    expected = change.reshape(envelope).peak_bytes(8)
    by_hand = trace_step(spec_of_language(chunk=1024), 8).steady.peak_bytes

    assert expected == pytest.approx(by_hand, rel=0.15)
    assert by_hand < envelope.peak_bytes(8) / 3


@pytest.mark.slow
def test_fused_update_takes_no_temporaries() -> None:
    """A fused optimizer's update needs less memory than the foreach one."""
    spec = spec_of_classes(num_blocks=8, width=128)
    fused = next(one for one in possible_changes(spec) if one.name == "fused optimizer")

    plain, after = (trace_step(one, 2).steady.peak_bytes for one in (spec, with_changes(spec, [fused])))

    assert after < 0.85 * plain


@pytest.mark.slow
def test_what_is_proposed_fits_and_one_more_does_not() -> None:
    """Traces confirm that the largest size fits on a CPU, and the next size does not."""
    spec = step_spec(Net, optimizer=adamw, loss=ab.mean_over_samples(classes), sample=torch.zeros(1, 32), profile="cpu")
    budget = budget_of("cpu:1MiB", headroom=0.0)

    target = PlanTarget(budget=budget, effective_batch_size=4096)
    found = fit_of(spec, find_envelopes(spec, budget.usable_bytes), target)

    assert trace_step(spec, found.largest).steady.peak_bytes <= MIB
    assert trace_step(spec, found.largest + 1).steady.peak_bytes > MIB


@pytest.mark.slow
def test_parts_are_even() -> None:
    """A share that needs several micro-batches is split without a superfluous one, none larger than fits."""
    spec = spec_of_classes()
    budget = budget_of("600MiB", headroom=0.0)
    envelopes = find_envelopes(spec, budget.usable_bytes)

    for share in (1, 7, 64, 100_000, 300_001):
        found = fit_of(spec, envelopes, PlanTarget(budget=budget, effective_batch_size=share))
        assert found.micro_batch_size <= found.largest
        assert found.micro_batch_size * found.accumulation_steps >= share
        assert found.micro_batch_size * (found.accumulation_steps - 1) < share


@pytest.mark.slow
def test_changes_are_ranked() -> None:
    """Changes are sorted by accumulation steps, and the first needs fewer than the plan without changes."""
    spec, budget = spec_of_language(), budget_of("900MiB", headroom=0.0)
    plan = make_plan(spec, budget, 64, name="net")

    steps = [change.accumulation_steps for change in plan.changes]

    assert steps == sorted(steps)
    assert plan.changes[0].name.startswith("loss in chunks")
    assert plan.changes[0].accumulation_steps < plan.accumulation_steps


@pytest.mark.slow
def test_nothing_fits() -> None:
    """If not even one sample fits, the plan gives the reason."""
    plan = planned(spec_of_language(), "620MiB", 64, proposals=True)

    assert not plan.fits
    assert set(plan.summary()) == {"fits", "because", "peak", "smallest"}


@pytest.mark.slow
def test_one_part_is_named_if_it_is_too_large_alone() -> None:
    """A category that alone exceeds the budget is reported as the reason."""
    plan = planned(spec_of_classes(num_blocks=8, width=512), "534MiB", 4)
    sizes = plan.baseline.peak.by_category
    largest = max(sizes, key=lambda name: sizes[name])

    assert sizes[largest] > plan.budget.usable_bytes
    assert f"the {largest} " in plan.summary()["because"]


@pytest.mark.slow
def test_known_case_of_one_device() -> None:
    """With a batch of 64 and room for 4, there are 16 accumulation steps."""
    spec = spec_of_language()
    envelopes = find_envelopes(spec, 2**30)
    limit = next(size for size in range(100, 2000) if largest_that_fits(envelopes.steady, size * MIB) == 4)
    plan = planned(spec, f"{limit + 532}MiB", 64)

    assert plan.micro_batch_size == 4
    assert plan.accumulation_steps == 16
    assert str(plan.batch) == "64 samples = 1 rank x 16 micro-batches x 4"


@pytest.mark.parametrize(("device", "headroom"), [("RTX 4091", 0.15), ("24 GiBB", 0.15), ("24GiB", 1.0)])
def test_devices_that_are_none(device: str, headroom: float) -> None:
    """Raise for an unknown device, and for a headroom that leaves no memory."""
    with pytest.raises(UserError):
        budget_of(device, headroom=headroom)


def test_budget_is_what_tensors_can_have() -> None:
    """The budget excludes headroom, context, communicators and workspaces; on a CPU only headroom."""
    one, two = budget_of("H100", headroom=0.1), budget_of("H100", world_size=2, headroom=0.1)

    assert one.total_bytes * 0.9 - one.usable_bytes == pytest.approx(532 * MIB, abs=1)
    assert one.usable_bytes - two.usable_bytes == 688 * 10**6
    assert budget_of("cpu:1GiB", headroom=0.0).usable_bytes == 2**30


@pytest.mark.slow
def test_changes_that_cannot_be_planned_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that raises is left out of the proposals."""
    spec, budget = spec_of_classes(), budget_of("600MiB")
    envelopes = find_envelopes(spec, budget.usable_bytes)
    broken = [change for change in possible_changes(spec) if change.name == "checkpointing"]

    def refuse(train: TrainSpec) -> TrainSpec:
        del train
        message = "no"
        raise UserError(message)

    changes = [dataclasses.replace(broken[0], apply=refuse), *broken]
    monkeypatch.setattr(fit, "possible_changes", lambda *_: changes)

    assert [
        one.name for one in propose(spec, envelopes, PlanTarget(budget=budget, effective_batch_size=64), fits=True)
    ] == ["checkpointing"]


@pytest.mark.slow
def test_a_plan_is_drawn(tmp_path: Path) -> None:
    """The picture of a plan labels its micro-batches from 1, its device and its peak."""
    pytest.importorskip("matplotlib", reason="needs the extra anybatch[plot]")
    plan = planned(spec_of_classes(), "600MiB", 10**6)

    draw_plan(plan, tmp_path / "plan.svg")

    text = (tmp_path / "plan.svg").read_text(encoding="utf-8")
    for word in ("micro-batch 1", "micro-batch 2", "600 MiB", "peak"):
        assert word in text
    assert "micro-batch 0" not in text
