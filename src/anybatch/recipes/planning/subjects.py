"""Things that can be planned: a recipe, a published model by its name, or a configuration of `transformers`."""

import difflib
import importlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch.core.batch import Placement
from anybatch.core.loss import mean_over_samples, mean_over_tokens
from anybatch.core.splitting import Cut
from anybatch.core.tree import Batch
from anybatch.data.batches import batches
from anybatch.engine.spec import TrainSpec
from anybatch.errors import UserError
from anybatch.planner.trace.step_spec import MakeTrainSpec
from anybatch.recipes.job import Job
from anybatch.recipes.load import RECIPES, load_recipe
from anybatch.recipes.planning.decoder import Decoder
from anybatch.recipes.planning.known_models import KNOWN_MODELS


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
        notes: remarks for the user on what the sample stands for.
    """

    name: str
    train: MakeTrainSpec
    sample: Batch
    effective_batch_size: int | None = None
    own_batch: bool = False
    notes: tuple[str, ...] = ()


def load_subject(name: str, *, sequence_length: int | None = None) -> PlanSubject:
    """Return the subject that a name stands for.

    Args:
        name: a published model (`llama-3.1-8b`), a file `config.json` of transformers, or what `load_recipe` takes.
        sequence_length: tokens of a sample of a language model; None for its whole context.

    Raises:
        UserError: there is no such thing, or it has no sequences.
    """
    if name in KNOWN_MODELS:
        return subject_of_known_model(name, sequence_length=sequence_length)
    if name.endswith(".json"):
        return subject_of_config(_read_config(Path(name)), sequence_length=sequence_length)
    if sequence_length is not None:
        message = f"a sequence length of {sequence_length} was given, and the samples of {name!r} are as its data is."
        raise UserError(message)
    near = difflib.get_close_matches(name, [*RECIPES, *KNOWN_MODELS], n=1)
    if name not in RECIPES and ":" not in name and (near or "." not in name):
        hint = f"Did you mean {near[0]!r}?" if near else f"It can be {', '.join([*RECIPES, *KNOWN_MODELS])}."
        message = f"{name!r} is nothing that can be planned. {hint} A recipe of your own is file.py:function."
        raise UserError(message)
    return subject_of_job(load_recipe(name), name)


def subject_of_job(job: Job, name: str = "job") -> PlanSubject:
    """Return the subject of a job, with the first sample of its data."""
    data = batches(job.dataset(), effective_batch_size=1, steps=1, shuffle=job.shuffle, collate=job.collate)
    return PlanSubject(
        name=name,
        train=job.train_spec,
        sample=next(Placement(Cut(), 1, 0).micro_batches(next(iter(data)))),
        effective_batch_size=job.defaults.effective_batch_size,
    )


def subject_of_known_model(name: str, *, sequence_length: int | None = None, checkpointed: bool = False) -> PlanSubject:
    """Return a published language model, to be trained by AdamW to predict each token from those before it."""
    shape = KNOWN_MODELS[name]
    length = _length(sequence_length, shape.context, name) or shape.context
    return PlanSubject(
        name=name,
        train=lambda: TrainSpec(
            model=Decoder(replace(shape, context=length), checkpointed=checkpointed),
            optimizer=adamw,
            loss=mean_over_tokens(next_token_loss, labels="targets", shift=False),
            clip=1.0,
        ),
        # Only shapes count, so inputs and targets may be one tensor.
        sample=dict.fromkeys(("inputs", "targets"), torch.zeros(1, length, dtype=torch.int64)),
    )


def subject_of_config(config: Any, *, sequence_length: int | None = None) -> PlanSubject:  # noqa: ANN401 (not a dependency)
    """Return the model of a configuration of `transformers`, with a sample as its tokenizer would make it.

    Args:
        config: a `transformers.PreTrainedConfig`.
        sequence_length: tokens of a sample; None for as many as the model has positions.

    Raises:
        UserError: transformers is missing, or the model is of a kind that has no samples here.
    """
    name = next(iter(config.architectures or ()), None)
    kind = _class_of(config, name)
    length = _length(sequence_length, getattr(config, "max_position_embeddings", None), name or config.model_type)
    sample = _sample(config, kind, length)
    over_tokens = sample["labels"].dim() > 1
    # A model that predicts each token from those before it shifts its labels by itself.
    of_tokens = mean_over_tokens(own_loss, labels="labels", shift=_predicts_the_next(kind))
    loss = of_tokens if over_tokens else mean_over_samples(own_loss)
    return PlanSubject(
        name=f"{kind.__name__} ({config.model_type})",
        train=lambda: TrainSpec(model=kind(config), optimizer=adamw, loss=loss, clip=1.0),
        sample=sample,
    )


def next_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy over all tokens to predict.

    Args:
        model: from int64 (samples, tokens) to logits (samples, tokens, vocabulary).
        batch: "inputs" and "targets", int64 (samples, tokens) each; targets are shifted already.
    """
    return F.cross_entropy(model(batch["inputs"]).flatten(0, 1), batch["targets"].flatten())


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss that a model of transformers computes by itself, given labels."""
    loss: Tensor = model(**batch).loss
    return loss


def adamw(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """Return AdamW as language models are trained with."""
    return torch.optim.AdamW([parameter for _, parameter in named], lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)


def _class_of(config: Any, name: str | None) -> Any:  # noqa: ANN401 (not a dependency)
    """Return the model class of a configuration: the one it names, or else the one that predicts the next token."""
    transformers = _transformers()
    found = getattr(transformers, name, None) if name else None
    if found is None:
        names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        found = getattr(transformers, names.get(config.model_type, ""), None)
    if found is None:
        message = (
            f"nothing says which model a {type(config).__name__} is for: architectures={config.architectures!r}. Set "
            "config.architectures, such as ['BertForSequenceClassification']."
        )
        raise UserError(message)
    return found


def _predicts_the_next(kind: type) -> bool:
    return any(part in kind.__name__ for part in ("CausalLM", "LMHead"))


def _sample(config: Any, kind: Any, length: int | None) -> dict[str, Tensor]:  # noqa: ANN401 (not a dependency)
    """Return one sample as a model of transformers takes it. Only its shape matters."""
    if kind.main_input_name == "pixel_values":
        size = config.image_size
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        pixels = torch.zeros(1, config.num_channels, height, width)
        return {"pixel_values": pixels, "labels": torch.zeros(1, dtype=torch.int64)}
    if kind.main_input_name != "input_ids" or length is None:
        message = (
            f"{kind.__name__} takes {kind.main_input_name!r}, which cannot be made up here. Plan it from Python, with "
            "a batch of one sample: ab.plan(model, optimizer, loss, batch, ...)."
        )
        raise UserError(message)
    tokens = torch.zeros(1, length, dtype=torch.int64)
    # A classifier of sequences has one label for all tokens; one of tokens has a label for each.
    one_label = "Classification" in kind.__name__ and "Token" not in kind.__name__
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": torch.zeros(1, dtype=torch.int64) if one_label else tokens,
    }


def _length(asked: int | None, most: int | None, name: str) -> int | None:
    if asked is not None and (most is None or asked > most):
        message = f"a sequence length of {asked} was given, and {name} takes at most {most} tokens."
        raise UserError(message)
    return most if asked is None else asked


def _transformers() -> Any:  # noqa: ANN401 (a module)
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        message = "a config.json is read by transformers, which is not installed: pip install transformers."
        raise UserError(message) from error


def _read_config(path: Path) -> Any:  # noqa: ANN401 (not a dependency)
    """Return the configuration in a file.

    Raises:
        UserError: the file cannot be read, or transformers does not know its kind.
    """
    transformers = _transformers()
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        message = (
            f"{str(path)!r} is no configuration that transformers knows: {type(error).__name__}: {error}. It must be "
            "the config.json of a model, with a model_type."
        )
        raise UserError(message) from error
