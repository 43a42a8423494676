"""Optimizers that keep other weights in training than in evaluation, such as schedule-free ones."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import Optimizer


def prepare_for_training(optimizer: Optimizer) -> None:
    """Put an optimizer that has modes into its training mode."""
    if _has_modes(optimizer):
        optimizer.train()  # type: ignore[attr-defined]


@contextmanager
def evaluation_weights(optimizer: Optimizer) -> Iterator[None]:
    """Let an optimizer that has modes put its evaluation weights into the model for a while; others do nothing.

    Source: Defazio et al., "The Road Less Scheduled", 2024: gradients are taken at one point, and evaluated is the
    average. Its implementation switches between them by `train()` and `eval()` of the optimizer.
    """
    if not _has_modes(optimizer):
        yield
        return
    optimizer.eval()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        optimizer.train()  # type: ignore[attr-defined]


def _has_modes(optimizer: Optimizer) -> bool:
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))
