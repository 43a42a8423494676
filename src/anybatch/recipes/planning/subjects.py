"""Training steps that can be planned by name: recipes, published models, and models of installed libraries."""

import difflib
import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch.core.batch import lengths_of
from anybatch.core.loss import mean_over_samples, mean_over_tokens
from anybatch.core.run_config import RunConfig
from anybatch.core.tree import Batch
from anybatch.engine.arguments import TrainSpec
from anybatch.errors import UserError
from anybatch.planner.step_spec import MakeTrainSpec
from anybatch.recipes.job import Job
from anybatch.recipes.load import RECIPES, load_recipe
from anybatch.recipes.planning.decoder import KNOWN_MODELS, Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSubject:
    """A training step to plan, with its name and a sample."""

    name: str
    train: MakeTrainSpec  # function that returns a `TrainSpec` with a new model
    sample: Batch  # a batch of one sample, on the CPU
    settings: RunConfig | None = None  # settings of a job; None for a model
    makes_batches: bool = False  # whether the user's code creates whole batches
    called: Mapping[str, str] = field(default_factory=dict)  # names of blocks in the user's code, as in `StepSpec`
    notes: tuple[str, ...] = ()  # remarks for the user about the sample


DEFAULT_TOKENS = 8_192
"""Default tokens per sample: long-context models are trained at this length before their context is extended.

Source: Grattafiori et al. 2024, section 3.4.2; Jiang et al. 2023, table 1.
"""


def adamw(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """Return AdamW with the usual hyperparameters of language models."""
    return torch.optim.AdamW([parameter for _, parameter in named], lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)


def _made_by(kind: Callable[..., Optimizer], named: Iterable[tuple[str, nn.Parameter]], **options: float) -> Optimizer:
    return kind([parameter for _, parameter in named], **options)


OPTIMIZERS: Mapping[str, Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]] = MappingProxyType(
    {
        "adamw": adamw,
        "adam": partial(_made_by, torch.optim.Adam, lr=1e-3),
        "sgd": partial(_made_by, torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-4),
        "adafactor": partial(_made_by, torch.optim.Adafactor, lr=1e-3),
        "rmsprop": partial(_made_by, torch.optim.RMSprop, lr=1e-3, momentum=0.9),
    }
)
"""Optimizers by name; only the size of their state matters to a plan."""


def with_optimizer(subject: PlanSubject, name: str) -> PlanSubject:
    """Return the subject with another optimizer."""
    if name not in OPTIMIZERS:
        message = f"unknown optimizer {name!r}; choose one of {', '.join(OPTIMIZERS)}."
        raise UserError(message)
    return replace(subject, train=lambda: replace(subject.train(), optimizer=OPTIMIZERS[name]))


def choose_length(requested: int | None, maximum: int | None, name: str) -> tuple[int | None, tuple[str, ...]]:
    """Return the tokens per sample, and a note for the user if they are fewer than the model's maximum by default."""
    if requested is not None and maximum is not None and requested > maximum:
        message = f"the sequence length {requested} exceeds the {maximum} tokens that {name} supports."
        raise UserError(message)
    if requested is not None or maximum is None or maximum <= DEFAULT_TOKENS:
        return maximum if requested is None else requested, ()
    note = f"sequences of {DEFAULT_TOKENS:,} tokens ({name} supports {maximum:,})"
    return DEFAULT_TOKENS, (f"{note}; change with sequence_length (--sequence-length)",)


LIBRARIES = ("transformers", "torchvision", "timm")
"""Libraries whose models can be planned by name, as `timm:vit_large_patch16_224`."""
_USUAL_PIXELS = 224
_CLIP_TOKENS = 77
_HEADS = ("SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM", "IMAGE_CLASSIFICATION")
"""Training tasks of transformers; the first one for which a model type has a class is used."""
_COMPARED = "the loss compares the samples of a micro-batch; for an exact effective batch, plan a job with ab.joint"
_UNPADDED = "planned for samples without padding, which need no attention mask; a mask takes 1 to 5% more memory"


def subject_of_library(name: str, *, sequence_length: int | None = None) -> PlanSubject | None:
    """Return the library model with this name (`name` or `library:name`); None if no installed library has it."""
    library, _, model = name.rpartition(":")
    if library and library not in LIBRARIES:
        return None
    having = [lib for lib in LIBRARIES if library in {"", lib} and model in _names(lib, required=bool(library))]
    if len(having) > 1:
        message = f"{name!r} is in {' and '.join(having)}: use {' or '.join(f'{lib}:{name}' for lib in having)}."
        raise UserError(message)
    if not having:
        if library:
            message = f"{library} has no model {model!r} that can be planned by name."
            raise UserError(message)
        return None
    if having[0] == "transformers":
        config = _module("transformers").AutoConfig.for_model(model)
        if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
            # Any token works, but without one the model raises, because it cannot shift its labels.
            config.decoder_start_token_id = 0
        return subject_of_config(config, sequence_length=sequence_length)
    if sequence_length is not None:
        message = f"a sequence length of {sequence_length} was given, but {name} is a model for images."
        raise UserError(message)
    return _subject_of_images(having[0], model)


def subject_of_config_file(path: Path, *, sequence_length: int | None = None) -> PlanSubject:
    """Return the model of a `config.json` of transformers or diffusers."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if "_class_name" in values:
            return _subject_of_diffusers(values)
        config = _module("transformers").AutoConfig.for_model(values.pop("model_type"), **values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        message = (
            f"{str(path)!r} is not a configuration of transformers: {type(error).__name__}: {error}. It must be "
            "the config.json of a model, with a model_type, or of diffusers' UNet2DConditionModel."
        )
        raise UserError(message) from error
    return subject_of_config(config, sequence_length=sequence_length)


def subject_of_config(config: Any, *, sequence_length: int | None = None) -> PlanSubject:  # noqa: ANN401 (not a dependency)
    """Return the model of a configuration of `transformers`, with a sample like those of its tokenizer."""
    name = next(iter(config.architectures or ()), None)
    kind = _class_of(config, name)
    texts = getattr(config, "text_config", config)
    maximum = getattr(texts, "max_position_embeddings", None) or getattr(texts, "n_positions", None)
    length, notes = choose_length(sequence_length, maximum, name or config.model_type)
    sample = _sample(config, kind, length)
    # A model that predicts the next token shifts its labels itself.
    of_tokens = mean_over_tokens(own_loss, labels="labels", shift=_predicts_the_next(kind))
    loss = of_tokens if "labels" in sample and sample["labels"].dim() > 1 else mean_over_samples(own_loss)
    return PlanSubject(
        name=f"{kind.__name__} ({config.model_type})",
        train=lambda: TrainSpec(model=kind(config), optimizer=adamw, loss=loss, clip=1.0),
        sample=sample,
        notes=(*((*notes, _UNPADDED) if "input_ids" in sample else ()), *(() if "labels" in sample else (_COMPARED,))),
    )


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss that a model of transformers computes from labels, or from pairs without labels."""
    loss: Tensor = model(**batch, **({} if "labels" in batch else {"return_loss": True})).loss
    return loss


def class_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy over images, with the first head if a model has several."""
    logits = model(batch["image"])
    return F.cross_entropy(logits if isinstance(logits, Tensor) else logits[0], batch["label"])


def noise_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Return the mean squared error between the noise in a batch of latents and a UNet's prediction of it."""
    inputs = {name: value for name, value in batch.items() if name not in {"sample", "timestep", "noise"}}
    (found,) = model(batch["sample"], batch["timestep"], return_dict=False, **inputs)
    return F.mse_loss(found.float(), batch["noise"].float())


def _subject_of_images(library: str, model: str) -> PlanSubject:
    """Return an image classifier of torchvision or timm, at its published image size."""
    module = _module(library)
    if library == "timm":
        settings = module.get_pretrained_cfg(model)
        channels, height, width = (3, _USUAL_PIXELS, _USUAL_PIXELS) if settings is None else settings.input_size
        make = partial(module.create_model, model)
    else:
        channels, height, width = 3, *(2 * (_pixels_of(module, model),))
        make = partial(module.models.get_model, model)
    return PlanSubject(
        name=f"{library}:{model}",
        train=lambda: TrainSpec(model=make(), optimizer=adamw, loss=mean_over_samples(class_loss)),
        sample={"image": torch.zeros(1, channels, height, width), "label": torch.zeros(1, dtype=torch.int64)},
    )


def _pixels_of(torchvision: Any, model: str) -> int:  # noqa: ANN401 (a module)
    """Return the image size, in pixels, that a model of torchvision was published for."""
    weights = torchvision.models.get_model_weights(model)
    crop = [entry.transforms().crop_size[0] for entry in list(weights)[:1]]
    return crop[0] if crop else _USUAL_PIXELS


def _subject_of_diffusers(values: Mapping[str, Any]) -> PlanSubject:
    """Return a UNet of diffusers, trained to predict the noise in latents."""
    name = values["_class_name"]
    kind = getattr(_module("diffusers"), name, None)
    if name != "UNet2DConditionModel" or kind is None:
        message = f"a {name} of diffusers needs a sample. Plan it in Python: ab.plan(make, optimizer, loss, sample)."
        raise UserError(message)
    width, channels = values["cross_attention_dim"], values["in_channels"]
    latents = torch.zeros(1, channels, values["sample_size"], values["sample_size"])
    sample: dict[str, Any] = {
        "sample": latents,
        "noise": latents,
        "timestep": torch.zeros(1, dtype=torch.int64),
        "encoder_hidden_states": torch.zeros(1, _CLIP_TOKENS, width[0] if isinstance(width, Sequence) else width),
    }
    if values.get("addition_embed_type") == "text_time":
        pooled = values["projection_class_embeddings_input_dim"] - 6 * values["addition_time_embed_dim"]
        sample["added_cond_kwargs"] = {"text_embeds": torch.zeros(1, pooled), "time_ids": torch.zeros(1, 6)}

    def make() -> TrainSpec:
        return TrainSpec(model=kind.from_config(dict(values)), optimizer=adamw, loss=mean_over_samples(noise_loss))

    return PlanSubject(name=f"diffusers:{name}", train=make, sample=sample)


def _class_of(config: Any, name: str | None) -> Any:  # noqa: ANN401 (not a dependency)
    """Return the model class that a configuration names, else the class for the usual task of such models."""
    transformers = _module("transformers")
    found = getattr(transformers, name, None) if name else None
    if found is None:
        auto = transformers.models.auto.modeling_auto
        tables = (getattr(auto, f"MODEL_FOR_{head}_MAPPING_NAMES", {}) for head in _HEADS)
        # An encoder-decoder does not predict the next token, even if its halves have such classes.
        several = list(tables)[: 1 if getattr(config, "is_encoder_decoder", False) else None]
        names = (table.get(config.model_type) for table in several)
        found = next(
            (getattr(transformers, class_name, None) for class_name in names if isinstance(class_name, str)), None
        )
    if found is None:
        message = (
            f"the configuration does not determine the model of a {type(config).__name__}: "
            f"architectures={config.architectures!r}. Set config.architectures, such as "
            "['BertForSequenceClassification']."
        )
        raise UserError(message)
    return found


def _predicts_the_next(kind: type) -> bool:
    return any(part in kind.__name__ for part in ("CausalLM", "LMHead"))


def _sample(config: Any, kind: Any, length: int | None) -> dict[str, Tensor]:  # noqa: ANN401 (not a dependency)
    """Return one unpadded sample for a model of transformers. Only its shape matters."""
    inputs = signature(kind.forward).parameters
    compares = length is not None and {"input_ids", "pixel_values", "return_loss"} <= inputs.keys()
    images = getattr(config, "vision_config", config)
    if (compares or kind.main_input_name == "pixel_values") and hasattr(images, "image_size"):
        size = images.image_size
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        pixels = torch.zeros(1, images.num_channels, height, width)
        other = {"input_ids": (1, length or 1)} if compares else {"labels": (1,)}
        return {"pixel_values": pixels} | {key: torch.zeros(*size, dtype=torch.int64) for key, size in other.items()}
    if kind.main_input_name == "input_features" and hasattr(config, "num_mel_bins"):
        spectrogram = torch.zeros(1, config.num_mel_bins, 2 * config.max_source_positions)  # Whisper halves the length
        labels = torch.zeros(1, length or config.max_target_positions, dtype=torch.int64)
        return {"input_features": spectrogram, "labels": labels}
    # A sequence classifier has one label per sample, a token classifier one label per token.
    one_label = "Classification" in kind.__name__ and "Token" not in kind.__name__
    is_waveform = kind.main_input_name == "input_values" and one_label
    if "labels" not in inputs or (kind.main_input_name != "input_ids" and not is_waveform):
        message = (
            f"there is no sample of {kind.main_input_name!r} with labels for {kind.__name__}. Plan it in Python, with "
            "a batch of one sample: ab.plan(model, optimizer, loss, batch, ...)."
        )
        raise UserError(message)
    if length is None:
        message = f"{kind.__name__} takes inputs of any length: set sequence_length (--sequence-length)."
        raise UserError(message)
    sample = torch.zeros(1, length, dtype=torch.float32 if is_waveform else torch.int64)
    return {kind.main_input_name: sample, "labels": torch.zeros(1, dtype=torch.int64) if one_label else sample}


def _names(library: str, *, required: bool) -> Sequence[str]:
    """Return the model names of a library; empty if it is not installed and not `required`."""
    try:
        module = _module(library)
    except UserError:
        if required:
            raise
        return ()
    if library == "transformers":
        return list(module.models.auto.configuration_auto.CONFIG_MAPPING_NAMES)
    names: Sequence[str] = (
        module.models.list_models(module=module.models) if library == "torchvision" else module.list_models()
    )
    return names


def _module(library: str) -> Any:  # noqa: ANN401 (a module)
    try:
        return importlib.import_module(library)
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision was built for another torch
        message = f"this is a model of {library}, which is not installed or cannot be imported: pip install {library}."
        raise UserError(message) from error


def load_subject(name: str, *, sequence_length: int | None = None) -> PlanSubject:
    """Return the step to plan for a name.

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
        message = f"a sequence length of {sequence_length} was given, but the recipe {name!r} determines its own."
        raise UserError(message)
    near = difflib.get_close_matches(name, [*RECIPES, *KNOWN_MODELS], n=1)
    if name not in RECIPES and ":" not in name and (near or "." not in name):
        hint = (
            f"Did you mean {near[0]!r}?"
            if near
            else f"Choose one of {', '.join([*RECIPES, *KNOWN_MODELS])}, or a model of a library."
        )
        message = f"unknown model or recipe {name!r}. {hint} For your own recipe, pass file.py:function."
        raise UserError(message)
    return subject_of_job(load_recipe(name), name)


def subject_of_job(job: Job, name: str = "job") -> PlanSubject:
    """Return the step of a job with the data set's first sample, or its longest sample if the job has lengths."""
    dataset = job.dataset()
    size = len(dataset) if job.lengths is not None and hasattr(dataset, "__len__") else 1
    batch = next(iter(job.train_batches(dataset, effective_batch_size=size, steps=1)))
    lengths = lengths_of(batch)
    index = 0 if lengths is None else max(range(size), key=lengths.tokens.__getitem__)
    return PlanSubject(name=name, train=job.train_spec, sample=next(batch.feed([[index]])), settings=job.defaults)


def subject_of_known_model(name: str, *, sequence_length: int | None = None) -> PlanSubject:
    """Return a published language model, trained by AdamW to predict the next token."""
    config = KNOWN_MODELS[name]
    length, notes = choose_length(sequence_length, config.max_position_embeddings, name)
    assert length is not None, "the model has a longest sequence"
    return PlanSubject(
        name=name,
        train=lambda: TrainSpec(
            model=Decoder(config),
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
