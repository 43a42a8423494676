"""A training step with its name and a sample: the common form of all sources of models."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.core.run_config import RunConfig
from anybatch.core.tree import Batch
from anybatch.errors import UserError
from anybatch.planner.trace.step_spec import MakeTrainSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSubject:
    """A training step with its name and a sample.

    Attributes:
        train: builds what to train, with a new model each time.
        sample: a batch of one sample, on the CPU.
        settings: the settings of a job; None for a model, whose batch size is not known before it is built.
        own_batch: the user makes whole batches, so a CPU's memory holds all inputs, not just one micro-batch's.
        called: names of blocks in the user's code, as in `StepSpec`.
        notes: remarks for the user about the sample.
    """

    name: str
    train: MakeTrainSpec
    sample: Batch
    settings: RunConfig | None = None
    own_batch: bool = False
    called: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


USUAL_TOKENS = 8_192
"""Default tokens per sample: long-context models are trained at this length before their context is extended.

Source: Grattafiori et al. 2024, section 3.4.2; Jiang et al. 2023, table 1.
"""


def adamw(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """Return AdamW with the usual hyperparameters of language models."""
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
"""Optimizers by name; only the size of their state matters to a plan."""


def with_optimizer(subject: PlanSubject, name: str) -> PlanSubject:
    """Return a subject that another optimizer trains."""
    if name not in OPTIMIZERS:
        message = f"unknown optimizer {name!r}; choose one of {', '.join(OPTIMIZERS)}."
        raise UserError(message)
    return replace(subject, train=lambda: replace(subject.train(), optimizer=OPTIMIZERS[name]))


def length_of(asked: int | None, most: int | None, name: str) -> tuple[int | None, tuple[str, ...]]:
    """Return the tokens per sample, given the requested number and the model's maximum, and a note about them."""
    if asked is not None and most is not None and asked > most:
        message = f"the sequence length {asked} exceeds the {most} tokens that {name} supports."
        raise UserError(message)
    if asked is not None or most is None or most <= USUAL_TOKENS:
        return most if asked is None else asked, ()
    note = f"sequences of {USUAL_TOKENS:,} tokens ({name} supports {most:,})"
    return USUAL_TOKENS, (f"{note}; change with sequence_length (--sequence-length)",)
