"""A plan's largest size, what uses the memory, and the changes it proposes."""

import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import anybatch as ab
from anybatch.engine.arguments import TrainSpec
from anybatch.errors import UserError
from anybatch.planner import fit
from anybatch.planner.budget import budget_of
from anybatch.planner.changes import changed as with_changes
from anybatch.planner.changes import named_change
from anybatch.planner.envelopes import find_envelopes
from anybatch.planner.fit import PlanTarget, propose
from anybatch.planner.plan import Plan, draw_plan, make_plan
from anybatch.planner.stand_ins import FourBitLinear
from anybatch.planner.step_spec import StepSpec
from anybatch.planner.step_trace import trace_step
from tests.planner.step_specs import step_spec
from tests.planner.test_combinations import Net, adamw, classes

VOCABULARY, TIME, WIDTH = 8192, 1024, 16
MIB = 2**20
_STATE = ("weights", "gradients", "optimizer")


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


def language(model: Language, batch: Tensor) -> Tensor:
    """Return a mean over tokens, which equals the mean over samples of equal length."""
    return model.loss(batch)


def spec_of_classes(num_blocks: int = 4, width: int = 32) -> StepSpec:
    """Return a spec with negligible logits."""
    return step_spec(
        partial(Net, width, num_blocks),
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


@pytest.mark.slow
def test_loss_in_chunks_is_planned_as_by_hand() -> None:
    """A chunked loss is planned within 15% of one written by hand, and takes less than a third of the memory."""
    spec = spec_of_language()
    change = named_change(spec, "loss in chunks of 1024 tokens")
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
    fused = named_change(spec, "fused optimizer")

    plain, after = (trace_step(one, 2).steady.peak_bytes for one in (spec, with_changes(spec, [fused])))

    assert after < 0.85 * plain


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
    plan = planned(spec_of_language(), "620MiB", 64)

    assert not plan.fits
    assert set(plan.summary()) == {"fits", "because", "peak", "fastest"}


@pytest.mark.slow
def test_one_part_is_named_if_it_is_too_large_alone() -> None:
    """A category that alone exceeds the budget is reported as the reason."""
    plan = planned(spec_of_classes(num_blocks=8, width=512), "534MiB", 4)
    sizes = plan.baseline.peak.by_category
    largest = max(sizes, key=lambda name: sizes[name])

    assert sizes[largest] > plan.budget.usable_bytes
    assert f"the {largest} " in plan.summary()["because"]


def test_state_is_named_if_it_is_too_large_together() -> None:
    """If weights, gradients and optimizer exceed the budget together, they are the reason, not the activations."""
    spec = spec_of_classes(num_blocks=8, width=512)
    state = sum(
        planned(spec, "2GiB", 4).baseline.peak.by_category[name] for name in ("weights", "gradients", "optimizer")
    )
    plan = planned(spec, f"{state // MIB + 530}MiB", 4)

    assert max(plan.baseline.peak.by_category.values()) < plan.budget.usable_bytes < state
    assert all(name in plan.summary()["because"] for name in _STATE)


def test_weights_in_4_bits_are_counted_one_by_one() -> None:
    """The number of parameters of a 4-bit layer is that of the layer it replaces, and one for its scales."""
    layer = nn.Linear(64, 128)
    spec = dataclasses.replace(
        spec_of_classes(),
        train=lambda: TrainSpec(
            model=nn.Sequential(FourBitLinear(layer), nn.Linear(128, 4)),
            optimizer=lambda named: torch.optim.SGD([p for _, p in named if p.requires_grad], lr=0.1),
            loss=ab.mean_over_samples(lambda model, batch: model(batch["x"]).float().square().mean()),
        ),
        sample={"x": torch.zeros(1, 64)},
    )

    assert planned(spec, "2GiB", 4).num_parameters == 64 * 128 + 128 + 128 * 4 + 4 + 1


def test_budget_excludes_other_memory() -> None:
    """The budget excludes headroom, context, communicators and workspaces; on a CPU only headroom."""
    one, two = budget_of("H100", headroom=0.1), budget_of("H100", world_size=2, headroom=0.1)

    assert one.total_bytes * 0.9 - one.usable_bytes == pytest.approx(532 * MIB, abs=1)
    assert one.usable_bytes - two.usable_bytes == 688 * 10**6
    assert budget_of("cpu:1GiB", headroom=0.0).usable_bytes == 2**30


@pytest.mark.slow
def test_changes_that_cannot_be_planned_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that raises is left out of the proposals."""
    spec, budget = spec_of_classes(), budget_of("600MiB")
    envelopes = find_envelopes(spec, budget.usable_bytes)
    whole = named_change(spec, "checkpointing")

    def refuse(train: TrainSpec) -> TrainSpec:
        del train
        message = "no"
        raise UserError(message)

    changes = [dataclasses.replace(whole, apply=refuse), whole]
    monkeypatch.setattr(fit, "single_changes", lambda *_: changes)

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
