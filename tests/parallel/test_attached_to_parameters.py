"""Attributes, hooks and uses of parameters outside of the model train as in plain PyTorch or are refused."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.core.loss import Loss
from anybatch.errors import AnyBatchError, AnyBatchWarning, CompositionError, LossError, ParameterError
from anybatch.optimizers import CombinedOptimizer
from anybatch.parallel.dtensors import gather, is_dtensor
from anybatch.testing import relative_error
from tests.engine.cases import Batch, InMemory, vectors
from tests.parallel.sharded_models import Tower, loss_of, tower
from tests.ranks_fixture import Ranks

TOLERANCE = 1e-12
NUM_SAMPLES, NUM_STEPS = 11, 3
Named = Iterable[tuple[str, nn.Parameter]]
RETURNED_VIEW = "FSDP2-wrapped module .* returned a view tensor"


def sgd(named: Named) -> torch.optim.Optimizer:
    """Build an optimizer with weight decay, except for parameters marked as exempt."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for _, parameter in named:
        groups[not getattr(parameter, "_no_weight_decay", False)].append(parameter)
    given = [{"params": members, "weight_decay": 0.1 * decays} for decays, members in groups.items() if members]
    return torch.optim.SGD(given, lr=0.1, momentum=0.9)


def adafactor(named: Named) -> torch.optim.Optimizer:
    """Build an optimizer with factored state (rows and columns)."""
    return torch.optim.Adafactor([parameter for _, parameter in named], lr=0.1)


def muon(named: Named) -> torch.optim.Optimizer:
    """Combine an optimizer that orthogonalises full matrices with SGD for the other parameters."""
    parameters = [parameter for _, parameter in named]
    return CombinedOptimizer(
        torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.1),
        torch.optim.SGD([p for p in parameters if p.ndim != 2], lr=0.1),
    )


def with_attribute(model: Tower) -> None:
    """Exempt biases from weight decay with an attribute, inside and outside of blocks."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter._no_weight_decay = True  # type: ignore[attr-defined] # noqa: SLF001 (a user-defined attribute)


def with_hooks(model: Tower) -> None:
    """Mask rows of one gradient, clamp another in place, and remove a third hook again."""
    rows = torch.arange(6) % 2 == 0
    model.first.weight.register_hook(lambda gradient: gradient * rows[:, None])
    model.blocks[1].get_parameter("inner.weight").register_hook(lambda gradient: gradient.clamp_(-1e-3, 1e-3))
    model.last.weight.register_hook(torch.zeros_like).remove()


def with_accumulation_hook(model: Tower) -> None:
    """Attach a post-accumulate hook, which would run in every micro-batch."""
    model.first.weight.register_post_accumulate_grad_hook(lambda _: None)


class OwnParameter(nn.Parameter):
    """A subclass of `nn.Parameter`."""


def with_own_class(model: Tower) -> None:
    """Replace a parameter with one of a subclass."""
    model.first.bias = OwnParameter(model.first.bias.detach())


def with_transposed(model: Tower) -> None:
    """Replace a weight with a transposed one, as in channels-last models."""
    model.blocks[0].get_submodule("inner").weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64).t())


def penalised(model: Tower, names: Sequence[str], batch: Batch) -> torch.Tensor:
    """Return the loss plus a penalty on some weights."""
    return loss_of(model, batch) + 0.05 * sum(model.get_parameter(name).square().sum() for name in names)


def outer_penalty(model: Tower, batch: Batch) -> torch.Tensor:
    """Penalise weights outside of blocks."""
    return penalised(model, ("first.weight", "last.weight"), batch)


def block_penalty(model: Tower, batch: Batch) -> torch.Tensor:
    """Penalise the weight of a block."""
    return penalised(model, ("blocks.1.inner.weight",), batch)


def penalty_on_all(model: Tower, batch: Batch) -> torch.Tensor:
    """Penalise all weights: the sum of whole and sharded weights becomes a part of the loss."""
    return penalised(model, [name for name, _ in model.named_parameters()], batch)


def whole_block_penalty(model: Tower, batch: Batch) -> torch.Tensor:
    """Penalise the gathered weight of a block."""
    weight = model.blocks[1].get_parameter("inner.weight")
    return loss_of(model, batch) + 0.05 * (gather(weight) if is_dtensor(weight) else weight).square().sum()


def orthogonal(model: Tower, batch: Batch) -> torch.Tensor:
    """Penalise a block's weight for not being orthogonal."""
    weight = model.blocks[1].get_parameter("inner.weight")
    return loss_of(model, batch) + 0.01 * (weight.T @ weight - torch.eye(6, dtype=weight.dtype)).square().sum()


def gradient_penalty(model: Tower, batch: Batch) -> torch.Tensor:
    """Penalise the gradient of the output with respect to the input."""
    x = batch["x"].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).logsumexp(-1).sum(), x, create_graph=True)
    return loss_of(model, batch) + 0.1 * slope.square().sum(1).mean()


def own_slope(model: Tower, batch: Batch) -> torch.Tensor:
    """Differentiate a function that does not involve the model."""
    x = batch["x"].clone().requires_grad_()
    (slope,) = torch.autograd.grad(x.square().sum(), x)
    return loss_of(model, batch) + 0.0 * slope.sum()


def ragged(model: Tower, batch: Batch) -> torch.Tensor:
    """Run the model on a different number of rows per sample."""
    counts = (batch["y"] + 1).tolist()
    outputs = model(torch.cat([x.expand(count, -1) for x, count in zip(batch["x"], counts, strict=True)])).split(counts)
    return torch.stack([output.mean().square() for output in outputs]).mean()


def encode(model: Tower, batch: Batch) -> torch.Tensor:
    """Return the input of the cross-sample loss."""
    return model.encode(batch["x"])


def prototypes(model: Tower, hidden: torch.Tensor) -> torch.Tensor:
    """Compare samples with each other and with prototypes, which are weights of the model."""
    alike = hidden @ hidden.T / len(hidden)
    return (alike - 1).square().mean() + (hidden @ model.last.weight.T).logsumexp(1).mean()


def prototypes_in_block(model: Tower, hidden: torch.Tensor) -> torch.Tensor:
    """Use a block's weight as prototypes."""
    return prototypes(model, hidden) + (hidden @ model.blocks[0].get_parameter("inner.weight")).mean()


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """A test case.

    Attributes:
        loss: of the full batch, in plain PyTorch.
        declared: builds the engine's loss.
        attach: changes the model before training.
        optimizer: builds the optimizer from named parameters.
        refused: the error under fsdp; None if training is exact.
        refused_everywhere: whether every strategy raises this error.
    """

    loss: Callable[[Any, Batch], torch.Tensor] = loss_of
    declared: "Callable[[], Loss] | None" = None
    attach: Callable[[Tower], object] = lambda _: None
    optimizer: Callable[[Named], torch.optim.Optimizer] = sgd
    refused: "type[AnyBatchError] | None" = None
    refused_everywhere: bool = False


def across(function: Callable[[Tower, torch.Tensor], torch.Tensor], **options: Any) -> Attached:
    """Return a case with a cross-sample loss."""
    return Attached(
        loss=lambda model, batch: function(model, encode(model, batch)),
        declared=lambda: ab.joint(encode, function),
        **options,
    )


CASES: Mapping[str, Attached] = {
    "attributes": Attached(attach=with_attribute),
    "hooks": Attached(attach=with_hooks, refused=ParameterError),
    "accumulation hook": Attached(attach=with_accumulation_hook, refused=ParameterError, refused_everywhere=True),
    "own class": Attached(attach=with_own_class, refused=ParameterError),
    "strides": Attached(attach=with_transposed, refused=ParameterError),
    "Adafactor": Attached(optimizer=adafactor, refused=CompositionError),
    "Muon": Attached(optimizer=muon, refused=CompositionError),
    "penalty outside of blocks": Attached(loss=outer_penalty),
    "penalty in a block": Attached(loss=block_penalty, refused=LossError),
    "penalty on all weights": Attached(loss=penalty_on_all, refused=LossError),
    "penalty on a gathered weight": Attached(loss=whole_block_penalty, refused=LossError),
    "orthogonal block": Attached(loss=orthogonal, refused=LossError),
    "gradient penalty": Attached(loss=gradient_penalty, refused=LossError),
    "gradient of something else": Attached(loss=own_slope),
    "ragged samples": Attached(loss=ragged),
    "joint with prototypes": across(prototypes),
    "joint with a block's weight": across(prototypes_in_block, refused=LossError),
}


def whole(model: nn.Module) -> dict[str, Any]:
    """Return the full weights."""
    return {name: gather(parameter.detach()) for name, parameter in model.named_parameters()}


def plain(case: Attached) -> dict[str, Any]:
    """Return the weights after some steps of a plain loop over full batches."""
    model = tower("plain")
    case.attach(model)
    optimizer = case.optimizer(list(model.named_parameters()))
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        case.loss(model, vectors(NUM_SAMPLES)).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def outcome(name: str, strategy: str) -> tuple[str, float, list[str]]:
    """Run on every rank: return the error class, the distance of the weights from plain training, and the warnings.

    Only warnings of anybatch are returned; the first-step check is tested elsewhere.
    """
    warnings.filterwarnings("ignore", message=RETURNED_VIEW)
    case, model = CASES[name], tower("plain")
    case.attach(model)
    before = dict(model.named_parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AnyBatchWarning)
        try:
            with ab.Engine(
                model,
                case.optimizer,
                ab.mean_over_samples(case.loss) if case.declared is None else case.declared(),
                micro_batch_size=2,
                strategy=strategy,
                check_loss=False,
                world=ab.World.from_environment(),
            ) as engine:
                for _ in range(NUM_STEPS):
                    engine.step(InMemory(vectors(NUM_SAMPLES)))
        except AnyBatchError as error:
            if case.refused is ParameterError:  # the engine's constructor raised: nothing has changed
                assert all(one is before[name] for name, one in model.named_parameters())
            return type(error).__name__, 0.0, []
    said = [str(one.message) for one in caught if issubclass(one.category, AnyBatchWarning)]
    return "", relative_error(whole(model), plain(case)), said


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        (strategy, name)
        for number, name in enumerate(CASES)
        for strategy in ("fsdp", "zero1" if number % 2 else "all_reduce")
    ],
)
def test_trains_like_plain_torch_or_is_refused(strategy: str, name: str, two_ranks: Ranks) -> None:
    """Under every strategy the weights equal plain PyTorch's, or anybatch raises an error with the fix."""
    case = CASES[name]
    refused = case.refused if strategy == "fsdp" or case.refused_everywhere else None
    for error, distance, said in two_ranks.run(outcome, name, strategy):
        assert error == ("" if refused is None else refused.__name__)
        assert distance <= (1e-6 if name == "Muon" else TOLERANCE)  # Muon computes in bf16, also for float64 gradients
        assert not said
