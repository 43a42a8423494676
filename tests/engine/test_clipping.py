"""Clipping: torch's own, on the gradient of the whole batch, once."""

from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.engine.clipping import ClipByNorm, ClipByValue
from anybatch.testing import relative_error
from tests.engine.cases import STRATEGIES, InMemory, classify, perceptron, vectors
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
    """Run on every rank: return the same by the engine, in micro-batches."""
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


@pytest.mark.parametrize("clip", CLIPS)
def test_clipping_is_that_of_the_unsplit_gradient(clip: str, one_rank: Ranks, two_ranks: Ranks) -> None:
    """Three clipped steps, and the norms from before clipping, are those of the whole batch clipped by torch."""
    expected, norms = plain(clip, 3)
    runs = one_rank.run(clipped, clip, "single", 3)
    for strategy in ("all_reduce", "ddp"):
        runs += two_ranks.run(clipped, clip, strategy, 3)
    for state, found in runs:
        assert relative_error(state, expected.state_dict()) <= 1e-12
        assert found == pytest.approx(norms, rel=1e-12)


def test_policies_bite() -> None:
    """The limits of these tests are below the gradients' size, so that clipping changes the outcome."""
    free, norms = plain("not", 3)
    assert min(norms) > 0.05
    for clip in ("by norm", "by value"):
        assert relative_error(plain(clip, 3)[0].state_dict(), free.state_dict()) > 1e-2


def test_the_norm_is_measured_only_if_wanted() -> None:
    """measure_gradient_norm=False reports no norm, unless clipping needs it."""
    for clip, measured in ((None, False), (ClipByValue(0.1), False), (ClipByNorm(0.1), True)):
        model = perceptron()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = ab.mean_over_samples(classify)
        options: dict[str, Any] = {"clip": clip, "measure_gradient_norm": False, "world": ab.World()}
        with ab.Engine(model, optimizer, loss, **options) as engine:
            report = engine.step(vectors(5))
        assert (report.grad_norm is not None) == measured
