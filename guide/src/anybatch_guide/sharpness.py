"""Sharpness of a minimum: the largest eigenvalue of the Hessian of the loss over one effective batch."""

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
Vector = Float[Tensor, " number"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharpness:
    """An approximation of the largest eigenvalue of a Hessian. Prints as one line."""

    eigenvalue: float  # the approximation, with its sign; never larger than the true value
    residual: float  # maximum distance to an eigenvalue of the Hessian
    num_products: int  # number of Hessian-vector products

    def __str__(self) -> str:
        """Return the eigenvalue with its residual."""
        return f"largest eigenvalue {self.eigenvalue:.6g}, within {self.residual:.1g}, by {self.num_products} products"


def measure_sharpness(
    spec: TrainSpec,
    batch: Any,  # noqa: ANN401 (any nested batch)
    hardware: Hardware | None = None,
    *,
    max_products: int = 32,
    tolerance: float = 1e-3,
    seed: int = 0,
) -> Sharpness:
    """Return the largest eigenvalue of the Hessian of the loss of one effective batch. Call it on every rank.

    The product of the Hessian with a vector v is the gradient of (gradient . v). The engine computes it like a
    gradient: it sums over micro-batches and ranks, and divides by the count of the whole batch. The eigenvalue comes
    from the Lanczos iteration (1950) with full orthogonalisation. With the same number of products, it is at least as
    accurate as power iteration, which returns the eigenvalue of largest magnitude instead.

    Equal to `torch.linalg.eigvalsh(hessian)[-1]` of `torch.autograd.functional.hessian` over the unsplit batch.

    The model is copied, in its current mode and number format, without autocast; the original does not change.
    Attention uses torch's math kernel, because fused kernels cannot be differentiated twice. Each product needs one
    more copy of the parameters per rank, and a micro-batch about three times its memory in training.

    Limits: with BatchNorm in train mode, each split has a different loss. Eigenvalues depend on the parametrisation of
    the model (Dinh et al. 2017, arXiv 1703.04933), so they compare runs of one architecture, not architectures.
    """
    checked_int("max_products", max_products)
    loss = declared(spec.loss)
    if loss.kind.encode is not None:
        message = (
            "sharpness cannot be measured with a loss across samples (ab.joint). It needs second derivatives, but the "
            "first of the two passes keeps no graph. Use a loss that is a mean over samples or tokens."
        )
        raise LossError(message)
    settings = hardware or Hardware()
    if settings.strategy not in _STRATEGIES:
        message = (
            f"sharpness cannot be measured under strategy={settings.strategy!r}. It shards parameters or wraps the "
            f"model, which breaks second derivatives. Use one of {', '.join(map(repr, _STRATEGIES))}."
        )
        raise CompositionError(message)
    model, loss = copy.deepcopy((spec.model, loss))
    parameters = trainable(collect_modules(model, loss))
    products = _Products(loss.function, parameters)
    copied_spec = dataclasses.replace(
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
        world = settings.world or stack.enter_context(world_of(collect_modules(model, loss)))
        # "auto" might choose a strategy that shards parameters.
        strategy = settings.strategy if settings.strategy != "auto" else "all_reduce" if world.size > 1 else "single"
        engine = stack.enter_context(
            Engine.from_spec(copied_spec, dataclasses.replace(settings, world=world, strategy=strategy))
        )
        # Drawn on the CPU, so that it is the same on every rank and device.
        size = sum(parameter.numel() for parameter in parameters.values())
        first = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return _lanczos(lambda vector: products.of(engine, batch, vector), first, max_products, tolerance)


class _Products:
    """Products of the Hessian with vectors, computed by an engine as gradients of another loss."""

    def __init__(self, function: LossFunction, parameters: Mapping[str, Tensor]) -> None:
        self._function = function
        self._parameters = parameters
        self._vector: Sequence[Tensor] = ()

    def of(self, engine: Engine, batch: Any, vector: Vector) -> Vector:  # noqa: ANN401 (any nested batch)
        """Return the product with a vector."""
        parameters = list(self._parameters.values())
        parts = vector.split([parameter.numel() for parameter in parameters])
        self._vector = [
            part.view_as(one).to(one.device, one.dtype) for part, one in zip(parts, parameters, strict=True)
        ]
        gradients = zip(engine.gradients(batch).values(), parameters, strict=True)
        products = [torch.zeros_like(one) if product is None else product for product, one in gradients]
        return torch.cat([product.flatten().double().cpu() for product in products])

    def loss(self, model: Any, batch: Any) -> Any:  # noqa: ANN401 (as the user's)
        """Return a loss of the same form as the user's loss, whose gradient is the product."""
        with sdpa_kernel(SDPBackend.MATH):
            return self._directional(self._function(model, batch))

    def _directional(self, output: Any) -> Any:  # noqa: ANN401 (a number, one loss per item, a sum, or a dict of those)
        if isinstance(output, Mapping):
            return {name: self._directional(value) for name, value in output.items()}
        if isinstance(output, LossSum):
            return LossSum(self._derivative(output.total), output.count)
        if isinstance(output, Tensor) and output.dim():
            # Put the whole derivative into one item, because only the sum and the number of items matter.
            first = torch.zeros_like(output).flatten()
            first[0] = 1.0
            return first.view_as(output) * self._derivative(output.sum())
        return self._derivative(output)

    def _derivative(self, total: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Return the derivative of a loss in the direction of the vector, with its graph."""
        parameters = list(self._parameters.values())
        # A differentiable zero, for a term that does not depend on the parameters, or is linear in them.
        zero = sum((parameter.flatten()[:1].sum() * 0.0 for parameter in parameters), start=total * 0.0)
        if not total.requires_grad:
            return zero
        gradients = torch.autograd.grad(total, parameters, create_graph=True, allow_unused=True)
        parts = [(g * v).sum() for g, v in zip(gradients, self._vector, strict=True) if g is not None]
        return sum(parts, start=zero)


def _lanczos(product: Callable[[Vector], Vector], vector: Vector, max_products: int, tolerance: float) -> Sharpness:
    """Return the largest eigenvalue of a symmetric operator, given its product with a vector."""
    basis = [vector / vector.norm()]
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    while True:
        product_vector = product(basis[-1])
        diagonal.append(float(product_vector @ basis[-1]))
        # Orthogonalise twice, because once leaves rounding errors (Parlett 1980, "twice is enough").
        for _ in range(2):
            for other in basis:
                product_vector = product_vector - (product_vector @ other) * other
        norm = float(product_vector.norm())
        matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
        if off_diagonal:
            off = torch.tensor(off_diagonal, dtype=torch.float64)
            matrix = matrix + torch.diag(off, 1) + torch.diag(off, -1)
        values, vectors = torch.linalg.eigh(matrix)
        largest, residual = float(values[-1]), norm * abs(float(vectors[-1, -1]))
        # The eigenvalue is exact if the basis is complete, or if the product adds no new direction.
        is_exact = len(basis) == len(vector) or norm <= 1e-14 * max(1.0, abs(largest))
        if residual <= tolerance * abs(largest) or is_exact or len(diagonal) == max_products:
            return Sharpness(eigenvalue=largest, residual=residual, num_products=len(diagonal))
        off_diagonal.append(norm)
        basis.append(product_vector / norm)
