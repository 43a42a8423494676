"""The gradient of a batch at once, and of the same batch in micro-batches: how far apart are they?"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from anybatch.guide.experiment import Data, Experiment, Tell

NUM_SAMPLES: Final = 64
MICRO_BATCHES: Final = (
    (32,) * 2,
    (16,) * 4,
    (8,) * 8,
    (1,) * 64,
    (24, 24, 16),  # not all of one size
)
_DTYPES: Final = {"fp32": torch.float32, "fp64": torch.float64}


def run(tell: Tell) -> Data:
    """Compare both gradients, as one long vector each, for every way to cut and in both number formats."""
    cuts: list[dict[str, Any]] = []
    for done, micro_batches in enumerate(MICRO_BATCHES):
        tell({"kind": "guide.progress", "done": done, "of": len(MICRO_BATCHES), "what": f"{len(micro_batches)} parts"})
        errors = {name: relative_error(dtype, micro_batches) for name, dtype in _DTYPES.items()}
        cuts.append({"micro_batches": list(micro_batches), "relative_error": errors})
    num_parameters = sum(parameter.numel() for parameter in small_model(torch.float64).parameters())
    return {"num_samples": NUM_SAMPLES, "num_parameters": num_parameters, "cuts": cuts}


def relative_error(dtype: torch.dtype, micro_batches: Sequence[int]) -> float:
    """Return |accumulated - at once| / |at once| of the gradient of a mean over all samples."""
    model = small_model(dtype)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, 12, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, 4, (NUM_SAMPLES,), generator=generator)
    at_once = gradient(model, [inputs], [labels])
    accumulated = gradient(model, inputs.split(list(micro_batches)), labels.split(list(micro_batches)))
    return float((accumulated.double() - at_once.double()).norm() / at_once.double().norm())


def gradient(
    model: nn.Module, inputs: Sequence[Float[Tensor, "_ width"]], labels: Sequence[Int[Tensor, " _"]]
) -> Float[Tensor, " numbers"]:
    """Return the gradient of the mean over all samples of all parts, one part after the other."""
    model.zero_grad()
    for some_inputs, some_labels in zip(inputs, labels, strict=True):
        (functional.cross_entropy(model(some_inputs), some_labels, reduction="sum") / NUM_SAMPLES).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def small_model(dtype: torch.dtype) -> nn.Module:
    """Return a network whose numbers are those of a generator of its own, whatever the process has drawn before."""
    layers = nn.Linear(12, 32, device="meta"), nn.Tanh(), nn.Linear(32, 4, device="meta")  # draw nothing
    model = nn.Sequential(*layers).to_empty(device="cpu").double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return model.to(dtype)


EXPERIMENT = Experiment(
    name="gradient_equality",
    question="How far is the accumulated gradient from that of the batch at once?",
    run=run,
    seconds=1.0,
    noisy=("relative_error",),  # rounding: other instructions of a processor round in another order
)
