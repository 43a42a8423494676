"""Gradient clipping: torch's own, applied once, to the gradient of the whole batch."""

from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.engine.updater import ClipByNorm, ClipByValue
from anybatch.errors import UserError
from anybatch.testing import relative_error
from tests.engine.cases import NUM_CLASSES, STRATEGIES, InMemory, classify, perceptron, vectors
from tests.faults import sees
from tests.raising import raises
from tests.ranks_fixture import Ranks

CLIPS: dict[str, Any] = {
    "a number": 0.05,
    "by norm": ClipByNorm(0.05),
    "by value": ClipByValue(0.01),
    "by a norm that is never reached": ClipByNorm(1e6),
    "not": None,
}


def plain(clip: str, num_steps: int) -> tuple[nn.Module, list[float]]:
    """Return the model after plain steps on the whole batch, clipped by torch, and the norms before clipping."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    norms = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        classify(model, vectors(29)).backward()
        policy = CLIPS[clip]
        limit = policy.max_norm if isinstance(policy, ClipByNorm) else policy if isinstance(policy, float) else 1e9
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
        if isinstance(policy, ClipByValue):
            nn.utils.clip_grad_value_(model.parameters(), policy.max_value)
        optimizer.step()
    return model, norms


def clipped(clip: str, strategy: str, num_steps: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Run on every rank: return the same from the engine, in micro-batches."""
    model = perceptron()
    with ab.Engine(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5),
        ab.mean_over_samples(classify),
        micro_batch_size=3,
        clip=CLIPS[clip],
        strategy=STRATEGIES[strategy](),
        world=ab.World.from_environment(),
    ) as engine:
        norms = [float(engine.step(InMemory(vectors(29))).grad_norm or 0.0) for _ in range(num_steps)]
    return model.state_dict(), norms


@sees(
    "clipping by value cuts off at one side only",
    "src/anybatch/core/torch_internals.py",
    """
        at_most(tensors, limit)
""",
    "",
    cases=["by value"],
)
@pytest.mark.parametrize("clip", CLIPS)
def test_clipping_is_that_of_the_unsplit_gradient(clip: str, one_rank: Ranks, two_ranks: Ranks) -> None:
    """Three clipped steps of the engine, and the norms it reports, equal torch's clipping of the whole batch."""
    expected, norms = plain(clip, 3)
    runs = one_rank.run(clipped, clip, "single", 3)
    for strategy in ("all_reduce", "ddp"):
        runs += two_ranks.run(clipped, clip, strategy, 3)
    for state, found in runs:
        assert relative_error(state, expected.state_dict()) <= 1e-12
        assert found == pytest.approx(norms, rel=1e-12)


class Roles(nn.Module):
    """Has tied, frozen and unused parameters, an embedding, and a layer that a single sample uses."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.words = nn.Embedding(9, 4, sparse=sparse)
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.one.weight
        self.one.bias.requires_grad_(False)
        self.rare, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)
        self.out = nn.Linear(4, NUM_CLASSES)
        self.double()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.other(torch.tanh(self.one(self.words(words).mean(1)))))
        chosen = words[:, :1] == 0
        if chosen.any():
            hidden = hidden + self.rare(hidden) * chosen
        logits: torch.Tensor = self.out(hidden)
        return logits

    def groups(self) -> list[dict[str, Any]]:
        """Return four parameter groups: the third is unused, and parts of the second are rarely used."""
        modules = (self.words,), (self.one, self.rare), (self.idle,), (self.out,)
        groups = [[p for module in some for p in module.parameters()] for some in modules]
        return [{"params": group} for group in (groups[0], [*groups[1], self.other.bias], *groups[2:])]


def spoken() -> dict[str, torch.Tensor]:
    """Return labelled sentences; only the second to last begins with the rare word."""
    generator = torch.Generator().manual_seed(9)
    words = torch.randint(1, 9, (13, 3), generator=generator)
    words[11, 0] = 0
    return {"x": words, "y": torch.randint(0, NUM_CLASSES, (13,), generator=generator)}


BY_GROUP: dict[str, Any] = {
    "all by norm": 0.02,
    "all by value": ClipByValue(0.005),
    "each by norm": [0.01, ClipByNorm(0.02), ClipByNorm(0.03), 0.04],
    "norm, value and not": [ClipByNorm(0.01), ClipByValue(0.004), ClipByNorm(1.0), None],
}


def clipped_by_torch(name: str) -> dict[str, torch.Tensor]:
    """Return the weights after two plain steps on the whole batch, clipped by torch."""
    model = Roles(sparse=False)
    optimizer = torch.optim.SGD(model.groups(), lr=1.0)
    policies = BY_GROUP[name]
    everything = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parts = [group["params"] for group in optimizer.param_groups] if isinstance(policies, list) else [everything]
    for _ in range(2):
        optimizer.zero_grad()
        classify(model, spoken()).backward()
        for policy, part in zip(policies if isinstance(policies, list) else [policies], parts, strict=True):
            if isinstance(policy, ClipByValue):
                nn.utils.clip_grad_value_(part, policy.max_value)
            elif policy is not None:
                nn.utils.clip_grad_norm_(part, policy if isinstance(policy, float) else policy.max_norm)
        optimizer.step()
    return model.state_dict()


def clipped_by_engine(name: str, strategy: str, *, sparse: bool = False) -> dict[str, torch.Tensor]:
    """Run on every rank: return the same from the engine, in micro-batches of two."""
    model = Roles(sparse=sparse)
    with ab.Engine(
        model,
        torch.optim.SGD(model.groups(), lr=1.0),
        ab.mean_over_samples(classify),
        micro_batch_size=2,
        clip=BY_GROUP[name],
        check_loss=False,
        strategy=STRATEGIES[strategy](),
        world=ab.World.from_environment(),
    ) as engine:
        for _ in range(2):
            engine.step(InMemory(spoken()))
    return model.state_dict()


@pytest.mark.parametrize("name", BY_GROUP)
def test_groups_are_clipped_as_torch_clips_them(
    name: str, one_rank: Ranks, two_ranks: Ranks, three_ranks: Ranks
) -> None:
    """Clipping by group equals torch on the unsplit gradient, with tied, frozen, rarely used and unused parameters."""
    expected = clipped_by_torch(name)
    runs = one_rank.run(clipped_by_engine, name, "single") + three_ranks.run(clipped_by_engine, name, "all_reduce")
    for strategy in ("all_reduce", "ddp"):
        runs += two_ranks.run(clipped_by_engine, name, strategy)
    for state in runs:
        assert relative_error(state, expected) <= 1e-12


@pytest.mark.parametrize("name", BY_GROUP)
def test_sparse_gradients_are_clipped_alike(name: str) -> None:
    """A sparse gradient, on one rank, is clipped like a dense one."""
    assert relative_error(clipped_by_engine(name, "single", sparse=True), clipped_by_torch(name)) <= 1e-12


def test_policies_are_one_per_group() -> None:
    """Fewer policies than parameter groups raise an error with both numbers and leave no hook on the model."""
    model = Roles(sparse=False)
    optimizer = torch.optim.SGD(model.groups(), lr=1.0)
    with raises(UserError, "clip_groups"):
        ab.Engine(model, optimizer, ab.mean_over_samples(classify), clip=[1.0, None], world=ab.World())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())  # noqa: SLF001
