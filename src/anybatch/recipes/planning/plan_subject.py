"""A training step by its name, with a sample to learn from: what every source of models returns."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.core.tree import Batch
from anybatch.errors import UserError
from anybatch.planner.trace.step_spec import MakeTrainSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSubject:
    """A training step by its name, with a sample to learn from.

    Attributes:
        name: of the recipe, model or class.
        train: function () -> what is trained, with a new model each time.
        sample: a batch of one sample, on the CPU.
        effective_batch_size: samples of one step, where that is known before the model is made.
        own_batch: the user has whole batches, so that their inputs are all there on a CPU; not micro-batches as they
            are loaded.
        called: what blocks are called where the user has them, as in `StepSpec`.
        notes: remarks for the user on what the sample stands for.
    """

    name: str
    train: MakeTrainSpec
    sample: Batch
    effective_batch_size: int | None = None
    own_batch: bool = False
    called: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


USUAL_TOKENS = 8_192
"""Tokens of a sample where none are named: on so many long-context models learn before their context is extended.

Source: Grattafiori et al. 2024, section 3.4.2; Jiang et al. 2023, table 1.
"""


def adamw(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """Return AdamW as language models are trained with."""
    return torch.optim.AdamW([parameter for _, parameter in named], lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)


def _sgd(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.1, momentum=0.9, weight_decay=1e-4)


def _adafactor(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    return torch.optim.Adafactor([parameter for _, parameter in named], lr=1e-3)


def _adam(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    return torch.optim.Adam([parameter for _, parameter in named], lr=1e-3)


def _rmsprop(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    return torch.optim.RMSprop([parameter for _, parameter in named], lr=1e-3, momentum=0.9)


OPTIMIZERS: Mapping[str, Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]] = MappingProxyType(
    {"adamw": adamw, "adam": _adam, "sgd": _sgd, "adafactor": _adafactor, "rmsprop": _rmsprop}
)
"""Optimizers by name, as they are used most; their numbers do not matter to a plan, their state does."""


def with_optimizer(subject: PlanSubject, name: str) -> PlanSubject:
    """Return a subject that is trained by another optimizer.

    Args:
        subject: what is planned.
        name: one of `OPTIMIZERS`.

    Raises:
        UserError: there is none of that name.
    """
    if name not in OPTIMIZERS:
        message = f"optimizer={name!r} is none that is known by name. It can be {', '.join(OPTIMIZERS)}."
        raise UserError(message)
    return replace(subject, train=lambda: replace(subject.train(), optimizer=OPTIMIZERS[name]))


def length_of(asked: int | None, most: int | None, name: str) -> tuple[int | None, tuple[str, ...]]:
    """Return the tokens of a sample, as many as are asked for or as is usual, and what to say of them.

    Args:
        asked: tokens; None for all that the model can take, and at most `USUAL_TOKENS`.
        most: tokens that it can take; None for any number.
        name: of the model.

    Raises:
        UserError: it cannot take so many.
    """
    if asked is not None and most is not None and asked > most:
        message = f"a sequence length of {asked} was given, and {name} takes at most {most} tokens."
        raise UserError(message)
    if asked is not None or most is None or most <= USUAL_TOKENS:
        return most if asked is None else asked, ()
    note = f"planned for samples of {USUAL_TOKENS:,} tokens, of the {most:,} that {name} can take"
    return USUAL_TOKENS, (f"{note}: name a sequence length for others",)
