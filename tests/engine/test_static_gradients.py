"""Gradients in static buffers, as captured graphs return them, accumulate correctly."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import anybatch as ab
from anybatch.testing import relative_error
from tests.faults import sees
from tests.ranks_fixture import Ranks

TOLERANCE = 1e-12
_BUFFERS: dict[torch.Size, Tensor] = {}


class StaticProduct(torch.autograd.Function):
    """A matrix product whose backward writes the weight gradient into a static buffer and returns it."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        buffer = _BUFFERS.setdefault(weight.shape, torch.empty_like(weight))
        buffer.copy_(x.T @ gradient)
        return gradient @ weight.T, buffer.detach()


class NumpyProduct(StaticProduct):
    """The same as a new tensor over numpy's memory, with its own storage: no count shows that gradients share it."""

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        of_x, of_weight = StaticProduct.backward(ctx, gradient)
        return of_x, torch.from_numpy(of_weight.numpy())


PRODUCTS: dict[str, Any] = {"plain": torch.matmul, "static": StaticProduct.apply, "numpy": NumpyProduct.apply}


class Network(nn.Module):
    """Two layers; `late` is used only by samples with a positive first feature, so maybe not in early micro-batches."""

    def __init__(self, product: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.product = PRODUCTS[product]
        self.first = nn.Parameter(torch.randn(8, 6, dtype=torch.float64))
        self.late = nn.Parameter(torch.randn(6, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.product(x, self.first)
        if not bool((x[:, 0] > 0).any()):
            return hidden[:, :3]
        found: Tensor = hidden[:, :3] + (x[:, :1] > 0) * self.product(hidden, self.late)
        return found


def samples() -> dict[str, Tensor]:
    """Return 24 samples; only the last 18 use `late`."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 8, generator=generator, dtype=torch.float64)
    x[:, 0] = torch.where(torch.arange(24) < 6, -1.0, 1.0)
    return {"x": x, "y": torch.randint(0, 3, (24,), generator=generator)}


def mean_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy."""
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def encode(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return one vector of length 1 per sample."""
    return functional.normalize(model(batch["x"]), dim=1)


def contrast(_: nn.Module, outputs: Tensor) -> Tensor:
    """Return a loss that compares all samples with each other."""
    return functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def expected_gradients(kind: str) -> dict[str, Tensor | None]:
    """Return the full-batch gradient, without static buffers."""
    model = Network("plain")
    value = contrast(model, encode(model, samples())) if kind == "joint" else mean_loss(model, samples())
    value.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def static_errors(strategy: str) -> list[float]:
    """Run on a rank: return the errors of both kinds of losses, and of memory that torch did not allocate."""
    return [static_error(strategy, kind) for kind in ("mean", "joint", "numpy")]


def static_error(strategy: str, kind: str) -> float:
    """Run on a rank: return the relative error of the engine's gradient."""
    world = ab.World.from_environment()
    batch = {name: value[world.rank :: world.size] for name, value in samples().items()}
    if kind == "joint":
        num_own = len(samples()["y"]) // world.size
        batch = {name: value[world.rank * num_own :][:num_own] for name, value in samples().items()}
    with ab.Engine(
        Network("numpy" if kind == "numpy" else "static"),
        lambda named: torch.optim.SGD(named, lr=0.0),
        ab.joint(encode, contrast) if kind == "joint" else ab.mean_over_samples(mean_loss),
        micro_batch_size=2,
        strategy=strategy,
        check_loss=False,
        world=world,
    ) as engine:
        found = {name: None if g is None else whole(g) for name, g in engine.gradients(batch).items()}
    return relative_error(found, expected_gradients(kind))


def whole(gradient: Tensor) -> Tensor:
    """Return a gradient, sharded or not, as a full tensor."""
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


@sees(
    "static buffers: a first gradient stays in the buffer of a captured graph",
    "src/anybatch/parallel/gradient_buckets.py",
    "parameter.grad = parameter.grad.clone()",
    "parameter.grad = parameter.grad.detach()",
)
@pytest.mark.parametrize(
    ("strategy", "kind"), [("single", "mean"), ("single", "joint"), ("single", "numpy"), ("data_parallel", "mean")]
)
def test_one_process_accumulates_gradients_in_static_buffers_exactly(strategy: str, kind: str) -> None:
    """A buffer that the next backward overwrites does not change the accumulated gradient."""
    assert static_error(strategy, kind) <= TOLERANCE


@pytest.mark.parametrize("strategy", ["all_reduce", "ddp", "zero1", "fsdp"])
def test_two_ranks_accumulate_gradients_in_static_buffers_exactly(two_ranks: Ranks, strategy: str) -> None:
    """The same holds on two ranks under every strategy."""
    assert max(map(max, two_ranks.run(static_errors, strategy))) <= TOLERANCE
