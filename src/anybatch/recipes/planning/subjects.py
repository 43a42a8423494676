"""Finds the subject of a plan by name: a recipe, a published model, or a model of an installed library."""

import difflib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.core.batch import lengths_of
from anybatch.core.loss import mean_over_tokens
from anybatch.engine.arguments import TrainSpec
from anybatch.errors import UserError
from anybatch.recipes.job import Job
from anybatch.recipes.load import RECIPES, load_recipe
from anybatch.recipes.planning.decoder import Decoder
from anybatch.recipes.planning.known_models import KNOWN_MODELS
from anybatch.recipes.planning.library_models import subject_of_config_file, subject_of_library
from anybatch.recipes.planning.plan_subject import PlanSubject, adamw, length_of


def load_subject(name: str, *, sequence_length: int | None = None) -> PlanSubject:
    """Return the subject of a name.

    A name is a published model (`llama-3.1-8b`), a `config.json` of transformers or diffusers, a model type of
    transformers, a model of torchvision or timm (`timm:resnet50`), or a recipe as for `load_recipe`.
    """
    if name in KNOWN_MODELS:
        return subject_of_known_model(name, sequence_length=sequence_length)
    if name.endswith(".json"):
        return subject_of_config_file(Path(name), sequence_length=sequence_length)
    # Recipes first, because asking libraries for their names imports them.
    found = None if name in RECIPES or ".py" in name else subject_of_library(name, sequence_length=sequence_length)
    if found is not None:
        return found
    if sequence_length is not None:
        message = f"a sequence length of {sequence_length} was given, but {name!r} has its own."
        raise UserError(message)
    near = difflib.get_close_matches(name, [*RECIPES, *KNOWN_MODELS], n=1)
    if name not in RECIPES and ":" not in name and (near or "." not in name):
        hint = (
            f"Did you mean {near[0]!r}?"
            if near
            else f"Choose one of {', '.join([*RECIPES, *KNOWN_MODELS])}, or a model of a library."
        )
        message = f"unknown model or recipe {name!r}. {hint} Write a recipe of your own as file.py:function."
        raise UserError(message)
    return subject_of_job(load_recipe(name), name)


def subject_of_job(job: Job, name: str = "job") -> PlanSubject:
    """Return the subject of a job, with its first sample, or its longest if the job has lengths."""
    dataset = job.dataset()
    size = len(dataset) if job.lengths is not None and hasattr(dataset, "__len__") else 1
    batch = next(iter(job.train_batches(dataset, effective_batch_size=size, steps=1)))
    lengths = lengths_of(batch)
    place = 0 if lengths is None else max(range(size), key=lengths.tokens.__getitem__)
    return PlanSubject(
        name=name,
        train=job.train_spec,
        sample=next(batch.feed([[place]])),
        settings=job.defaults,
    )


def subject_of_known_model(name: str, *, sequence_length: int | None = None, checkpointed: bool = False) -> PlanSubject:
    """Return a published language model, trained by AdamW to predict the next token."""
    config = KNOWN_MODELS[name]
    length, notes = length_of(sequence_length, config.max_position_embeddings, name)
    assert length is not None, "the model has a longest sequence"
    return PlanSubject(
        name=name,
        train=lambda: TrainSpec(
            model=Decoder(config, checkpointed=checkpointed),
            optimizer=adamw,
            loss=mean_over_tokens(next_token_loss, labels="targets", shift=False),
            clip=1.0,
        ),
        # Only shapes matter, so inputs and targets may share a tensor.
        sample=dict.fromkeys(("inputs", "targets"), torch.zeros(1, length, dtype=torch.int64)),
        called=config.called,
        notes=notes,
    )


def next_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of logits (samples, tokens, vocabulary); the targets are already shifted."""
    return F.cross_entropy(model(batch["inputs"]).flatten(0, 1), batch["targets"].flatten())
