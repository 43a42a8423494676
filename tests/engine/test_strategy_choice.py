"""`strategy="auto"` depends on the memory of the smallest device (simulated here), alike on all ranks."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.core.units import HEADROOM
from anybatch.engine.notifier import num_bytes_of
from anybatch.engine.strategy_choice import replica_bytes
from anybatch.errors import DoesNotFitError
from tests.engine.cases import InMemory
from tests.ranks_fixture import Ranks

Named = Iterable[tuple[str, nn.Parameter]]
NUMBERS = 4 * (32 * 32 + 32) + 32 * 2 + 2
"""Number of parameters of the tower."""


def tower() -> nn.Module:
    """Return four blocks and a layer."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(nn.Sequential(*blocks), nn.Linear(32, 2))


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean cross-entropy."""
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def adamw(named: Named) -> torch.optim.Optimizer:
    """Return an optimizer with two moments that needs one more copy in its step."""
    return torch.optim.AdamW(named, lr=0.01, foreach=True)


def reads_numbers(named: Named) -> torch.optim.Optimizer:
    """Return an optimizer that cannot be built on the meta device."""
    held = list(named)
    assert all(parameter.abs().sum().item() >= 0 for _, parameter in held)
    return adamw(held)


class Foreign(torch.optim.AdamW):
    """An optimizer not known to update each parameter separately."""


OPTIMIZERS: dict[str, Callable[[Named], torch.optim.Optimizer]] = {
    "function": adamw,
    "sgd": lambda named: torch.optim.SGD(named, lr=0.01),
    "reads numbers": reads_numbers,
    "foreign": lambda named: Foreign(named, lr=0.01),
}


def limit(copies: float) -> int:
    """Return the memory of a device with room for this many copies of the parameters, plus headroom."""
    return int(4 * NUMBERS * copies / (1.0 - HEADROOM)) + 500


def engine(kind: str, device_bytes: int | None, **options: Any) -> ab.Engine:
    """Return an engine with "auto" on a device with this much memory."""
    model = tower()
    made = OPTIMIZERS[kind.removesuffix(", made")]
    optimizer: Any = made(list(model.named_parameters())) if kind.endswith(", made") else made
    world = replace(ab.World.from_environment(), device_bytes=device_bytes)
    return ab.Engine(
        model, optimizer, ab.mean_over_samples(loss), micro_batch_size=2, check_loss=False, world=world, **options
    )


def chosen(kind: str, device_bytes: int | None, **options: Any) -> str:
    """Run on every rank: return the decision, or the error."""
    try:
        with engine(kind, device_bytes, **options) as made:
            return made.decisions["strategy"]
    except DoesNotFitError as error:
        return f"refused: {error}"


ASKED: list[tuple[str, float | None, dict[str, Any], str]] = [
    ("function", None, {}, "all_reduce, because there are 2 ranks"),
    ("function", 5, {}, "all_reduce, because there are 2 ranks, and a replica's"),
    ("function", 4.9, {}, "zero1, because a replica's"),
    ("function", 3.5, {}, "zero1, because a replica's"),
    ("function", 3.4, {}, "fsdp, because a replica's"),
    ("function", 0.1, {}, "fsdp, because a replica's"),
    ("sgd", 3, {}, "all_reduce, because there are 2 ranks, and a replica's"),
    ("reads numbers", 4.9, {}, "fsdp, because a replica's"),
    ("foreign", 4.9, {}, "fsdp, because a replica's"),
    ("function, made", 4.9, {}, "zero1, because a replica's"),
    ("function, made", 2, {}, "zero1, because a replica's"),
    ("foreign, made", 4.9, {}, "all_reduce, because a replica's"),
    ("function, made", 1.5, {}, "refused: weights and gradients take"),
    ("foreign, made", 1.5, {}, "refused: weights and gradients take"),
]


def decisions() -> list[str]:
    """Run on every rank: return the decision in each case."""
    found = [chosen(kind, None if copies is None else limit(copies), **o) for kind, copies, o, _ in ASKED]
    # Rank 1 has the smaller device.
    found.append(chosen("function", limit(5) if ab.World.from_environment().rank == 0 else limit(3)))
    return found


@pytest.mark.slow
def test_replicas_while_they_fit(two_ranks: Ranks) -> None:
    """With "auto", replicas are used if they fit, else a sharded update, else sharded parameters, alike on all ranks.

    An optimizer instance rules out sharded parameters: then the best remaining strategy is used and reported, or an
    error gives the fix if none fits.
    """
    first, second = two_ranks.run(decisions)
    assert first == second
    for said, (kind, copies, _, expected) in zip(first, ASKED, strict=False):
        assert said.startswith(expected), (kind, copies, said)
    assert first[-1].startswith("fsdp, ")
    by_case = {(kind, copies): said for said, (kind, copies, _, _) in zip(first, ASKED, strict=False)}
    assert "optimizer as a function" in by_case["function, made", 2]
    assert "optimizer as a function" in by_case["foreign, made", 4.9]
    assert "optimizer=lambda named: torch.optim.AdamW" in by_case["function, made", 1.5]
    assert "with 15% left free" in by_case["function", 4.9]


@pytest.mark.slow
@pytest.mark.parametrize("made", [False, True], ids=["function", "instance"])
@pytest.mark.parametrize(("kind", "dtype"), [("AdamW", torch.bfloat16), ("SGD", torch.float32)])
def test_the_estimate_matches_a_step(kind: str, dtype: torch.dtype, made: bool) -> None:
    """The estimate equals the memory of an engine's tensors between steps, with one copy of the gradients."""

    def make(named: Named) -> torch.optim.Optimizer:
        return adamw(named) if kind == "AdamW" else torch.optim.SGD(named, lr=0.01)

    model = tower().to(dtype)
    optimizer = make(list(model.named_parameters())) if made else make
    counted = replica_bytes(optimizer, model, limit=0)
    running = ab.Engine(model, optimizer, ab.mean_over_samples(loss), micro_batch_size=3, check_loss=False)
    batch = InMemory({"x": torch.randn(3, 32, dtype=dtype), "y": torch.tensor([0, 1, 0])})
    running.step(batch)
    held = {category: num_bytes_of(tensors) for category, tensors in running.resident_tensors().items()}
    running.close()
    assert counted.weights + counted.update.state == held["weights"] + held["buffers"] + held["optimizer"]
    assert counted.gradients == 4 * NUMBERS
