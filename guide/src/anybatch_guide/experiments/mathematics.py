"""The derivation in numbers: sums of micro-batch gradients with correct and wrong factors, in two number formats."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from anybatch_guide.experiment import Data, Emit, Experiment, emit_progress

NUM_SAMPLES: Final = 64
CUTS: Final[Mapping[str, tuple[int, ...]]] = MappingProxyType(
    {"whole": (64,), "even": (16, 16, 16, 16), "uneven": (24, 24, 16)}
)
DTYPES: Final = MappingProxyType({"fp64": torch.float64, "bf16": torch.bfloat16})
_WIDTH, _HIDDEN, _CLASSES, _TOKENS = 12, 24, 5, 8
NORMS: Final[Mapping[str, Callable[[int], nn.Module]]] = MappingProxyType(
    {
        "BatchNorm": nn.BatchNorm1d,
        "LayerNorm": nn.LayerNorm,
        "RMSNorm": nn.RMSNorm,
        "GroupNorm": partial(nn.GroupNorm, 4),
    }
)
Factor = Callable[[Sequence[int], int], float]
"""Function (items of every part, index of the part) -> factor of the mean of that part."""
FACTORS: Final[Mapping[str, Factor]] = MappingProxyType(
    {
        "by_count": lambda counts, part: counts[part] / sum(counts),
        "by_parts": lambda counts, _part: 1 / len(counts),
        "none": lambda _counts, _part: 1.0,
    }
)


def run(emit: Emit) -> Data:
    """Compare every split, factor and format with the float64 gradient of the full batch."""
    rows: list[dict[str, Any]] = []
    for loss in ("samples", "tokens"):
        for done, cut in enumerate(CUTS):
            emit_progress(emit, done, len(CUTS), f"{loss}, {cut}")
            rows += [
                {"loss": loss, "cut": cut, "factor": factor, "format": name, **compared(loss, cut, factor, dtype)}
                for factor in FACTORS
                for name, dtype in DTYPES.items()
            ]
    counts = {cut: counts_of("tokens", cut) for cut in CUTS}
    return {
        "num_parameters": sum(parameter.numel() for parameter in network(torch.float64).parameters()),
        "targets": counts,
        "rows": rows,
        "norms": {name: norm_error(make) for name, make in NORMS.items()},
    }


def norm_error(make: Callable[[int], nn.Module]) -> float:
    """Return the relative error of four equal parts in float64, with a normalization layer in the network."""
    expected, parts = (
        gradient("samples", CUTS[cut], FACTORS["by_parts"], torch.float64, make(_HIDDEN).double())
        for cut in ("whole", "even")
    )
    return float((parts - expected).norm() / expected.norm())


def compared(loss: str, cut: str, factor: str, dtype: torch.dtype) -> dict[str, float]:
    """Compare a sum of parts with the float64 gradient of the full batch: relative error and length ratio."""
    expected = gradient(loss, CUTS["whole"], FACTORS["by_count"], torch.float64)
    parts = gradient(loss, CUTS[cut], FACTORS[factor], dtype).double()
    return {
        "relative_error": float((parts - expected).norm() / expected.norm()),
        "length_ratio": float(parts.norm() / expected.norm()),
    }


def gradient(
    loss: str, cut: Sequence[int], factor: Factor, dtype: torch.dtype, norm: nn.Module | None = None
) -> Float[Tensor, " number"]:
    """Return the sum over parts of factor x gradient of the part's mean, with respect to the network without `norm`."""
    model = network(dtype)
    if norm is not None:
        first, *rest = model.children()
        model = nn.Sequential(first, norm.requires_grad_(requires_grad=False), *rest)
    inputs, targets = data(loss)
    counts = [int((part >= 0).sum()) for part in targets.split(list(cut))]
    pairs = zip(inputs.to(dtype).split(list(cut)), targets.split(list(cut)), strict=True)
    for number, (some_inputs, some_targets) in enumerate(pairs):
        if counts[number] == 0:
            continue  # the mean over no targets is NaN, and 0 x NaN is NaN
        logits = model(some_inputs).flatten(0, -2)
        mean = F.cross_entropy(logits, some_targets.flatten(), ignore_index=-100)
        (mean * factor(counts, number)).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def counts_of(loss: str, cut: str) -> list[int]:
    """Return the number of targets in each part."""
    _, targets = data(loss)
    return [int((part >= 0).sum()) for part in targets.split(list(CUTS[cut]))]


def data(loss: str) -> tuple[Float[Tensor, "sample ..."], Int[Tensor, "sample ..."]]:
    """Return inputs and targets: one target per sample, or one per token with padding at the end of each row."""
    random = torch.Generator().manual_seed(1)
    if loss == "samples":
        inputs = torch.randn(NUM_SAMPLES, _WIDTH, generator=random, dtype=torch.float64)
        return inputs, torch.randint(0, _CLASSES, (NUM_SAMPLES,), generator=random)
    inputs = torch.randn(NUM_SAMPLES, _TOKENS, _WIDTH, generator=random, dtype=torch.float64)
    targets = torch.randint(0, _CLASSES, (NUM_SAMPLES, _TOKENS), generator=random)
    return inputs, targets.masked_fill(_padding_mask(random), -100)


def _padding_mask(random: torch.Generator) -> Bool[Tensor, "sample token"]:
    """Return the padding mask of rows that are sorted by length, as in many loaders."""
    lengths = torch.randint(1, _TOKENS + 1, (NUM_SAMPLES,), generator=random).sort().values
    return torch.arange(_TOKENS) >= lengths[:, None]


def network(dtype: torch.dtype) -> nn.Sequential:
    """Return a network initialized from a separate generator."""
    layers = nn.Linear(_WIDTH, _HIDDEN, device="meta"), nn.Tanh(), nn.Linear(_HIDDEN, _CLASSES, device="meta")
    model = nn.Sequential(*layers).to_empty(device="cpu").double()
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.4, generator=random)
    return model.to(dtype)


EXPERIMENT = Experiment(
    name="mathematics",
    question="With which factors do the gradients of the parts add up to the full gradient, in each number format?",
    run=run,
    seconds=2.0,
    tolerance=1e-2,
    noisy=("relative_error", "LayerNorm", "RMSNorm", "GroupNorm"),  # rounding differs between processors
)
