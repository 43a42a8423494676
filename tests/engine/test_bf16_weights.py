"""bf16 weights updated in float32 without copies: no update is lost, and rounding is unbiased."""

from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

import anybatch as ab
from anybatch.engine import bf16_weights
from anybatch.engine.bf16_weights import Bf16Weights, joined, split, stochastically_rounded
from anybatch.errors import CompositionError, UserError
from tests.engine.cases import Batch
from tests.faults import sees
from tests.ranks_fixture import Ranks

WAYS: tuple[Bf16Weights, ...] = ("split", "stochastic")
NUMBERS = st.integers(-(2**31), 2**31 - 1)
"""All bit patterns of a float32."""


def of_bits(bits: list[int]) -> torch.Tensor:
    """Return the float32 numbers with these bits."""
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


def neighbours(bits: int) -> tuple[int, int]:
    """Return the bits of the bf16 numbers on either side of a finite float32, as integers."""
    lower = bits & 0xFFFF0000
    return lower, lower + 0x10000 if bits & 0xFFFF else lower


@sees(
    "half a unit is added before the bits are truncated",
    "src/anybatch/engine/bf16_weights.py",
    "up = drawn.add_(",
    "up = drawn.add_(1).add_(",
)
@settings(deadline=None, max_examples=30)
@given(NUMBERS)
def test_stochastic_rounding_is_unbiased(bits: int) -> None:
    """Averaged over all 65,536 random inputs, stochastic rounding returns exactly the number."""
    value = of_bits([bits])
    low, high = (of_bits([one - (1 << 32) if one >> 31 else one]) for one in neighbours(bits & 0xFFFFFFFF))
    if not (value.isfinite() and high.isfinite()):
        return

    every = torch.arange(1 << 16, dtype=torch.int32)
    rounded = stochastically_rounded(value.expand(1 << 16).contiguous(), every)
    num_high = int((rounded.float() == high).sum()) if high.item() != low.item() else 0
    share = Fraction(num_high, 1 << 16)
    assert Fraction(low.item()) * (1 - share) + Fraction(high.item()) * share == Fraction(value.item())


@sees(
    "low bits are lost",
    "src/anybatch/engine/bf16_weights.py",
    "wide.view(torch.int32).add_(missing)",
    "wide.view(torch.int32)",
)
@settings(deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=50))
def test_two_halves_restore_a_number(bits: list[int]) -> None:
    """Both halves restore the float32 number bit for bit; the upper half is the nearest bf16 number."""
    values = of_bits(bits)
    upper, missing = split(values)
    again = joined(upper, missing)
    finite = values.isfinite()
    assert torch.equal(again[finite].view(torch.int32), values[finite].view(torch.int32))
    assert torch.equal(again.isnan(), values.isnan())
    nearest = values.to(torch.bfloat16)
    # Torch rounds ties to even; they are not compared.
    is_tie = (values.view(torch.int32) & 0xFFFF) == 1 << 15
    assert torch.equal(upper[finite & ~is_tie], nearest[finite & ~is_tie])


def model() -> nn.Module:
    """Return a network in bf16 with one layer in float32."""
    torch.manual_seed(3)
    made = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4)).bfloat16()
    made[1].float()
    return made


def squares(network: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean squared error."""
    hidden = network[1](network[0](batch["x"]).float())  # type: ignore[index]
    return F.mse_loss(network[2](hidden.bfloat16()).float(), batch["y"])  # type: ignore[index]


def batch_of(step: int) -> Batch:
    """Return the batch of a step."""
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randn(8, 10, generator=generator)
    return {"x": drawn[:, :6].bfloat16(), "y": drawn[:, 6:]}


def adamw(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """Return an optimizer with state."""
    return torch.optim.AdamW([one for _, one in named], lr=1e-3)


def engine_of(way: Bf16Weights, make: Any = adamw, **further: Any) -> ab.Engine:
    """Return an engine over the network."""
    return ab.Engine(
        model(), make, ab.mean_over_samples(squares), micro_batch_size=2, bf16_weights=way, clip=0.5, **further
    )


def trained(engine: ab.Engine, first: int, last: int) -> list[torch.Tensor]:
    """Return the model's parameters after some steps."""
    for step in range(first, last):
        engine.step(batch_of(step))
    return [parameter.detach().clone() for parameter in engine.model.parameters()]  # type: ignore[union-attr]


def by_hand(num_steps: int) -> list[torch.Tensor]:
    """Return float32 master weights trained by hand, with forwards on weights rounded by `split`."""
    network = model()
    masters = [nn.Parameter(one.detach().float()) for one in network.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-3)
    for step in range(num_steps):
        batch = batch_of(step)
        for start in range(0, 8, 2):
            piece = {name: value[start : start + 2] for name, value in batch.items()}
            gradients = torch.autograd.grad(squares(network, piece) / 4, list(network.parameters()))
            for master, gradient in zip(masters, gradients, strict=True):
                master.grad = gradient.float() if master.grad is None else master.grad + gradient
        nn.utils.clip_grad_norm_(masters, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for own, master in zip(network.parameters(), masters, strict=True):
                own.copy_(split(master.detach())[0] if own.dtype is torch.bfloat16 else master)
    return [master.detach() for master in masters]


@pytest.mark.parametrize("piece_bytes", [1, 1 << 28])
@sees(
    "the lower bits are kept for the next step only",
    "src/anybatch/engine/bf16_weights.py",
    "bits.copy_(missing)",
    "pass",
)
def test_split_weights_equal_float32_weights(monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    """Thirty steps with split weights equal float32 master weights, bit for bit in the upper halves."""
    monkeypatch.setattr(bf16_weights, "PIECE_BYTES", piece_bytes)
    with engine_of("split") as engine:
        found = trained(engine, 0, 30)
        assert engine.decisions["update"].startswith("the optimizer updates float32 weights")
    for mine, master in zip(found, by_hand(30), strict=True):
        expected = split(master)[0] if mine.dtype is torch.bfloat16 else master
        torch.testing.assert_close(mine, expected, rtol=0, atol=0 if mine.dtype is torch.bfloat16 else 1e-7)


@pytest.mark.parametrize("way", WAYS)
@sees(
    "rounds differently after a resume",
    "src/anybatch/engine/bf16_weights.py",
    "rounding_seed(self._seed, step, number)",
    "rounding_seed(self._seed, 0, id(optimizer) % 99991)",
)
def test_a_resumed_run_is_bitwise_equal(way: Bf16Weights, tmp_path: Path) -> None:
    """A run resumed after five of ten steps equals the uninterrupted run, bit for bit."""
    with engine_of(way, seed=7) as engine:
        whole = trained(engine, 0, 10)
    with engine_of(way, seed=7) as engine:
        trained(engine, 0, 5)
        engine.save(tmp_path / "five")
    with engine_of(way, seed=7) as engine:
        engine.load(tmp_path / "five")
        resumed = trained(engine, 5, 10)
        states = [v for s in engine.optimizer.state.values() for v in s.values() if v.dim()]
        assert any(value.dtype is torch.bfloat16 for value in states) == (way == "stochastic")
    assert all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True))


def on_ranks(way: Bf16Weights) -> list[torch.Tensor]:
    """Run on every rank: return the weights after four steps over two ranks."""
    network = model()
    world = ab.World.from_environment()
    with ab.Engine(
        network, adamw, ab.mean_over_samples(squares), micro_batch_size=2, bf16_weights=way, clip=0.5, world=world
    ) as engine:
        for step in range(4):
            share = {name: value[4 * world.rank : 4 * world.rank + 4] for name, value in batch_of(step).items()}
            engine.step(share)
    return [parameter.detach() for parameter in network.parameters()]


@pytest.mark.parametrize("way", WAYS)
def test_ranks_round_equally(way: Bf16Weights, two_ranks: Ranks) -> None:
    """Replicas are equal bit for bit, and equal to one rank up to the rounding of the sum."""
    first, second = two_ranks.run(on_ranks, way)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    with engine_of(way) as engine:
        alone = trained(engine, 0, 4)
    for one, other in zip(first, alone, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0.02, atol=1e-3)


REFUSED: dict[str, dict[str, Any]] = {
    "the optimizer was created": {"optimizer": lambda network: torch.optim.SGD(network.parameters(), lr=0.1)},
    "which this strategy shards or copies": {"strategy": "zero1"},
    "the scaler may skip a call of": {"precision": "fp16"},
    "no trainable parameter is in bf16": {"to": torch.float32},
    "is in fp16": {"to": torch.float16},
    "must be one of 'copied', 'split', 'stochastic'": {"bf16_weights": "kahan"},
}
"""Parts of error messages, and the arguments that raise them."""


@pytest.mark.parametrize("words", REFUSED)
def test_combinations_are_refused(words: str) -> None:
    """Combinations without a float32 update of bf16 weights raise an error that gives the reason."""
    options = {"bf16_weights": "split", **REFUSED[words]}
    network = model().to(options.pop("to", torch.bfloat16))
    optimizer = options.pop("optimizer", lambda _: adamw)(network)
    with pytest.raises((CompositionError, UserError)) as caught:
        ab.Engine(network, optimizer, ab.mean_over_samples(squares), micro_batch_size=2, **options)
    assert words in str(caught.value)
