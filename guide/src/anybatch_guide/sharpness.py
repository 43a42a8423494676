"""How sharp a minimum is: the largest eigenvalue of the Hessian of an effective batch's loss, exact over the batch."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from anybatch.core.geometry import checked_int
from anybatch.core.loss import LossSum, declared
from anybatch.core.loss_kinds import LossFunction
from anybatch.engine.arguments import Hardware, TrainSpec
from anybatch.engine.engine import Engine
from anybatch.engine.user_code import collect_modules, world_of
from anybatch.errors import CompositionError, LossError
from anybatch.parallel.strategy import trainable

_STRATEGIES = ("auto", "single", "all_reduce")
Vector = list[Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharpness:
    """An approximation of the largest eigenvalue of a Hessian. Prints as one line."""

    eigenvalue: float  # the largest one, with its sign; never above the true one
    residual: float  # distance within which an eigenvalue of the Hessian lies
    num_products: int  # number of Hessian-vector products

    def __str__(self) -> str:
        """Return the eigenvalue with its residual."""
        return f"largest eigenvalue {self.eigenvalue:.6g}, within {self.residual:.1g}, by {self.num_products} products"


def measure_sharpness(
    spec: TrainSpec,
    batch: Any,  # noqa: ANN401 (any nested batch)
    hardware: Hardware | None = None,
    *,
    most_products: int = 32,
    tolerance: float = 1e-3,
    seed: int = 0,
) -> Sharpness:
    """Return the largest eigenvalue of the Hessian of the loss of one effective batch. Call it on every rank.

    A product of the Hessian with a vector v is the gradient of (gradient . v), and gradients add up over micro-batches
    and ranks: the engine takes it of the whole batch, with the divisor of the whole batch, as it takes a gradient. The
    eigenvalue is found by Lanczos's iteration (1950), orthogonalised in full: by the same products it is at least as
    near as power iteration, and it gives the largest eigenvalue where that gives the one of largest magnitude.

    Equal to `torch.linalg.eigvalsh(hessian)[-1]` of `torch.autograd.functional.hessian` over the un-split batch.

    The model is copied, in its current mode and number format, without autocast; the user's is unchanged. Attention is
    computed by torch's plain kernel, since the fused ones cannot be differentiated twice. A rank holds one more copy of
    the parameters for each product, and a micro-batch takes about three times the memory of a training step's.

    Limits: a model with BatchNorm in train mode has another loss for each cut. Eigenvalues depend on how the model is
    parametrised (Dinh et al. 2017, arXiv 1703.04933), so they compare runs of one architecture, not architectures.
    """
    checked_int("most_products", most_products)
    loss = declared(spec.loss)
    if loss.kind.encode is not None:
        message = (
            "sharpness needs second derivatives, and a loss across samples (ab.joint) runs in two passes, of which the "
            "first keeps no graph. Measure it with a loss that is a mean over samples or tokens."
        )
        raise LossError(message)
    given = hardware or Hardware()
    if given.strategy not in _STRATEGIES:
        message = (
            f"sharpness cannot be measured under strategy={given.strategy!r}, which shards parameters or wraps the "
            f"model: second derivatives do not pass. Use one of {', '.join(map(repr, _STRATEGIES))}."
        )
        raise CompositionError(message)
    model, loss = copy.deepcopy((spec.model, loss))
    parameters = trainable(collect_modules(model, loss))
    products = _Products(loss.function, parameters)
    copied = dataclasses.replace(
        spec,
        model=model,
        loss=dataclasses.replace(loss, function=products.loss),
        # `gradients` makes no update, and this optimizer has no state.
        optimizer=lambda named: torch.optim.SGD(named, lr=0.0),
        precision="fp32",
        scheduler=None,
        clip=None,
        average_decay=None,
        check_loss=False,
        spikes=None,
    )
    with ExitStack() as stack:
        world = given.world or stack.enter_context(world_of(collect_modules(model, loss)))
        # "auto" might take one that shards, where memory is short.
        strategy = given.strategy if given.strategy != "auto" else "all_reduce" if world.size > 1 else "single"
        engine = stack.enter_context(
            Engine.from_spec(copied, dataclasses.replace(given, world=world, strategy=strategy))
        )
        first = _first_vector(parameters, seed)
        return _lanczos(lambda vector: products.of(engine, batch, vector), first, most_products, tolerance)


class _Products:
    """Products of the Hessian with vectors, taken by an engine as gradients of another loss."""

    def __init__(self, function: LossFunction, parameters: Mapping[str, Tensor]) -> None:
        self._function = function
        self._parameters = parameters
        self._vector: Sequence[Tensor] = ()

    def of(self, engine: Engine, batch: Any, vector: Vector) -> Vector:  # noqa: ANN401 (any nested batch)
        """Return the product with a vector."""
        self._vector = vector
        found = engine.gradients(batch)
        pairs = zip(found.values(), self._parameters.values(), strict=True)
        return [torch.zeros_like(parameter) if product is None else product for product, parameter in pairs]

    def loss(self, model: Any, batch: Any) -> Any:  # noqa: ANN401 (as the user's)
        """Return a loss, in the form of the user's, whose gradient is the product."""
        with sdpa_kernel(SDPBackend.MATH):
            return self._directional(self._function(model, batch))

    def _directional(self, output: Any) -> Any:  # noqa: ANN401 (a number, one loss per item, a sum, or a dict of those)
        if isinstance(output, Mapping):
            return {name: self._directional(value) for name, value in output.items()}
        if isinstance(output, LossSum):
            return LossSum(self._derivative(output.total), output.count)
        if isinstance(output, Tensor) and output.dim():
            # All of it in one item: only the sum over items and their number matter.
            first = torch.zeros_like(output).flatten()
            first[0] = 1.0
            return first.view_as(output) * self._derivative(output.sum())
        return self._derivative(output)

    def _derivative(self, total: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Return the derivative of a loss along the vector, with its graph."""
        parameters = list(self._parameters.values())
        # Of a term that no parameter has a part in, or that is linear in all of them, nothing is left to differentiate.
        nothing = sum((parameter.flatten()[:1].sum() * 0.0 for parameter in parameters), start=total * 0.0)
        if not total.requires_grad:
            return nothing
        found = torch.autograd.grad(total, parameters, create_graph=True, allow_unused=True)
        parts = [(one * along).sum() for one, along in zip(found, self._vector, strict=True) if one is not None]
        return sum(parts, start=nothing)


def _first_vector(parameters: Mapping[str, Tensor], seed: int) -> Vector:
    # Drawn on the CPU, so that it is the same on every rank and device.
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(one.shape, generator=generator, dtype=torch.float64).to(one.device, one.dtype)
        for one in parameters.values()
    ]


def _lanczos(product: Callable[[Vector], Vector], vector: Vector, most_products: int, tolerance: float) -> Sharpness:
    """Return the largest eigenvalue of the symmetric operator whose product with a vector is given."""
    vector = _scaled(vector, 1.0 / _dot(vector, vector) ** 0.5)
    basis = [vector]
    diagonal: list[float] = []
    beside: list[float] = []
    while True:
        image = product(basis[-1])
        diagonal.append(_dot(image, basis[-1]))
        # Twice: once leaves as much rounding as the vectors have in common (Parlett 1980, "twice is enough").
        for _ in range(2):
            for other in basis:
                image = _minus(image, other, _dot(image, other))
        rest = _dot(image, image) ** 0.5
        matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
        if beside:
            off = torch.tensor(beside, dtype=torch.float64)
            matrix = matrix + torch.diag(off, 1) + torch.diag(off, -1)
        values, vectors = torch.linalg.eigh(matrix)
        largest, residual = float(values[-1]), rest * abs(float(vectors[-1, -1]))
        # With one vector per parameter, or no further vector, the eigenvalue is exact.
        is_whole = len(basis) == sum(one.numel() for one in vector) or rest <= 1e-14 * max(1.0, abs(largest))
        if residual <= tolerance * abs(largest) or is_whole or len(diagonal) == most_products:
            return Sharpness(eigenvalue=largest, residual=residual, num_products=len(diagonal))
        beside.append(rest)
        basis.append(_scaled(image, 1.0 / rest))


def _dot(one: Vector, other: Vector) -> float:
    return float(sum(torch.sum(a.double() * b.double()) for a, b in zip(one, other, strict=True)))


def _scaled(vector: Vector, factor: float) -> Vector:
    return [one * factor for one in vector]


def _minus(vector: Vector, other: Vector, factor: float) -> Vector:
    return [a - factor * b for a, b in zip(vector, other, strict=True)]
