"""`ab.exact(trainer)`: every step of a Trainer has the gradient of its samples as one batch."""

import copy
import inspect
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import anybatch as ab
from anybatch.core.tensors import relative_error
from anybatch.errors import LossError, UserError
from anybatch.integrations.divisor import ItemCounter
from anybatch.testing import run_ranks
from tests.integrations.heads import HEADS, WIDTH, Head, Sample, classified, collate, hf, question
from tests.integrations.trainer_runs import NUM_SAMPLES, Gradients, Run, join_ranks
from tests.raising import raises, warns

pytest.importorskip("accelerate", reason="needs the extra anybatch[transformers]")

BOUND = 1e-14
EXPECTED = {  # the items of the loss, whether it divides by num_items_in_batch, and whether the Trainer alone is exact
    "Llama": ("shifted tokens", True, True),
    "Llama, tied": ("shifted tokens", True, True),
    "GPT-2": ("shifted tokens", True, False),
    "Mixtral": ("shifted tokens", True, True),
    "BERT, masked": ("tokens", False, False),
    "BERT, tokens": ("tokens", False, False),
    "T5": ("tokens", False, False),
    "BERT, classes": ("samples", False, False),
    "BERT, several classes": ("samples", False, False),
    "BERT, regression": ("samples", False, False),
    "Llama, classes": ("samples", False, False),
    "BERT, choices": ("samples", False, False),
    "BERT, questions": ("samples", False, False),
    "ViT": ("samples", True, True),
    "wav2vec2, sum": ("sum", False, True),
    "wav2vec2, mean": ("samples", False, False),
}
CHECKPOINTING = (
    "activation_checkpointing"
    if "activation_checkpointing" in inspect.signature(hf.TrainingArguments).parameters
    else "gradient_checkpointing"
)


@pytest.fixture(autouse=True)
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models compute their losses in float64: they call `logits.float()`."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_steps_have_the_gradient_of_one_batch(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The gradient is that of the step's samples in one batch, also in the last, shorter step."""
    items, divides, is_exact_alone = EXPECTED[name]
    plain, run = Run(HEADS[name], tmp_path), Run(HEADS[name], tmp_path)
    plain.trainer.train()
    ab.exact(run.trainer).train()

    assert (plain.worst_error() < BOUND) == is_exact_alone
    assert run.worst_error() < BOUND
    printed = capsys.readouterr().out
    expected = f"a sum over {items}, divided" if divides else f"a mean over {items}."
    assert ("a sum that is not divided" if items == "sum" else expected) in printed


def errors_on_a_rank(names: Sequence[str], folder: Path) -> dict[str, float]:
    """Train each model on every rank, and return its largest error."""
    join_ranks()
    errors = {}
    for name in names:
        run = Run(HEADS[name], folder, ddp_backend="gloo")
        ab.exact(run.trainer).train()
        assert run.trainer.accelerator.num_processes == dist.get_world_size()
        errors[name] = run.worst_error()
    return errors


@pytest.mark.ranks
@pytest.mark.slow
def test_ranks(tmp_path: Path) -> None:
    """On two ranks, the gradient is that of the samples of both ranks in one batch."""
    names = ["GPT-2", "BERT, tokens", "BERT, classes", "wav2vec2, sum"]
    outcomes = run_ranks(2, errors_on_a_rank, names, tmp_path)

    assert not any(outcome.error for outcome in outcomes), outcomes[0].error
    assert all(error < BOUND for outcome in outcomes for error in outcome.value.values()), outcomes


def test_logged_losses_are_those_of_the_whole_step(tmp_path: Path) -> None:
    """The logged loss is the mean over all tokens of the step."""
    run = Run(HEADS["BERT, tokens"], tmp_path)
    ab.exact(run.trainer).train()
    model = run.head.model().double().eval()
    model.load_state_dict(run.initial)
    with torch.no_grad():
        expected = [float(model(**collate(window)).loss) for window in run.windows()]

    assert run.losses() == pytest.approx(expected, rel=1e-6)  # the Trainer adds losses in float32


def test_evaluation_is_as_before(tmp_path: Path) -> None:
    """The evaluation loss of an exact trainer is that of the trainer alone."""
    plain, run = Run(HEADS["BERT, tokens"], tmp_path), Run(HEADS["BERT, tokens"], tmp_path)
    ab.exact(run.trainer).train()
    plain.trainer.train()

    found, expected = (one.trainer.evaluate(one.samples)["eval_loss"] for one in (run, plain))
    assert found == expected


@pytest.mark.parametrize(
    "options",
    [{"label_smoothing_factor": 0.1}, {"average_tokens_across_devices": False}, {CHECKPOINTING: True}],
    ids=str,
)
def test_options_of_the_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    """Label smoothing, checkpointing and counts per device keep the gradient exact."""
    run = Run(HEADS["Llama"], tmp_path, **options)
    ab.exact(run.trainer).train()

    def loss(model: nn.Module, batch: Sample) -> torch.Tensor:
        if "label_smoothing_factor" not in options:
            return model(**batch).loss  # type: ignore[no-any-return]
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        return run.trainer.label_smoother(model(**inputs), batch["labels"], shift_labels=True)  # type: ignore[no-any-return]

    assert run.worst_error(loss) < BOUND


def test_the_probe_leaves_no_trace(tmp_path: Path) -> None:
    """Random numbers, the training mode and gradients are as before the probe, so dropout is as without it."""

    def without_first(generator: torch.Generator, length: int) -> Sample:
        sample = HEADS["GPT-2"].sample(generator, length)
        return {**sample, "labels": torch.cat([torch.tensor([-100]), sample["labels"][1:]])}

    def trained(*, exact: bool) -> tuple[torch.Tensor, Gradients]:
        torch.manual_seed(1)
        config = hf.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=64)
        run = Run(Head(lambda: hf.GPT2LMHeadModel(config), without_first), tmp_path, gradient_accumulation_steps=1)
        if exact:
            ab.exact(run.trainer, count=ab.tokens(shift=False))  # as the Trainer counts; first tokens are no targets
        run.trainer.train()
        return torch.get_rng_state(), run.steps[-1]

    (state, alone), (exact_state, exact) = trained(exact=False), trained(exact=True)

    assert torch.equal(state, exact_state)
    assert relative_error(exact, alone) < BOUND


def test_a_micro_batch_without_targets_adds_nothing(tmp_path: Path) -> None:
    """A mean over no tokens is left out instead of making the loss NaN."""

    def half_empty(generator: torch.Generator, length: int) -> Sample:
        sample = HEADS["BERT, tokens"].sample(generator, length)
        return sample if length % 2 else {**sample, "labels": torch.full_like(sample["labels"], -100)}

    run = Run(
        Head(HEADS["BERT, tokens"].model, half_empty),
        tmp_path,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=12,
    )
    ab.exact(run.trainer).train()

    assert run.worst_error() < BOUND


def test_most_samples_without_targets(tmp_path: Path) -> None:
    """The items are found out also where the samples of the first micro-batch have no targets, as with random masks."""

    def rarely_labelled(generator: torch.Generator, length: int) -> Sample:
        sample = HEADS["BERT, tokens"].sample(generator, length)
        return sample if length > 16 else {**sample, "labels": torch.full_like(sample["labels"], -100)}

    run = Run(Head(HEADS["BERT, tokens"].model, rarely_labelled), tmp_path)
    ab.exact(run.trainer).train()

    assert run.worst_error() < BOUND


class Pixels(nn.Module):
    """A model that classifies pixels, with a mean over pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 3)

    def forward(self, image: torch.Tensor, labels: torch.Tensor, **_: Any) -> Any:
        """Return the loss."""
        scores = self.layer(image[..., None])
        return hf.modeling_outputs.ModelOutput(loss=nn.functional.cross_entropy(scores.flatten(0, 2), labels.flatten()))


def test_labels_of_pixels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mean over labelled pixels is found, and exact."""

    def picture(generator: torch.Generator, length: int) -> Sample:
        labels = torch.randint(3, (4, 5), generator=generator)
        labels.flatten()[:length] = -100
        return {"image": torch.randn(4, 5, generator=generator).double(), "labels": labels}

    run = Run(Head(Pixels, picture), tmp_path)
    ab.exact(run.trainer).train()

    assert run.worst_error() < BOUND
    assert "a mean over tokens." in capsys.readouterr().out


class RandomMask(nn.Module):
    """A model that draws a mask in every forward, also in eval mode, as masked autoencoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Embedding(64, 8)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        """Return a mean over samples."""
        mask = torch.rand(len(input_ids), 8) > 0.5
        return {"loss": (self.layer(input_ids).mean(1).square() * mask).mean()}


def test_a_model_that_draws_masks(tmp_path: Path) -> None:
    """Its items are not found out, but a declared count is accepted: the loss does not seem to be partly divided."""
    head = Head(RandomMask, classified)
    with raises(LossError, "unknown_items"):
        ab.exact(Run(head, tmp_path).trainer).train()

    run = Run(head, tmp_path)
    ab.exact(run.trainer, count=ab.samples()).train()
    assert len(run.steps) == len(run.windows())


@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_a_declared_count(scale: float, tmp_path: Path) -> None:
    """`count=` sets the divisor of a loss whose items the probe cannot find out, also if a step counts less than 1."""
    weights = scale * torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)

    def weighted(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        del num_items_in_batch
        return nn.functional.cross_entropy(outputs.logits, labels, weights)

    head = HEADS["BERT, classes"]
    refused = Run(head, tmp_path, compute_loss_func=weighted)
    with raises(LossError, "unknown_items"):
        ab.exact(refused.trainer).train()

    run = Run(head, tmp_path, compute_loss_func=weighted)
    ab.exact(run.trainer, count=lambda batch: weights[batch["labels"]].sum().item()).train()

    def loss(model: nn.Module, batch: Sample) -> torch.Tensor:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        return weighted(model(**inputs), batch["labels"])

    assert run.worst_error(loss) < BOUND


def late(head: Head, change: Callable[[Sample], Sample], first: int = 20) -> Head:
    """Return a head whose samples are changed, but not those of about the last steps."""
    numbers = itertools.count()

    def make(generator: torch.Generator, _: int) -> Sample:
        sample = head.sample(generator, 8)
        return sample if next(numbers) % NUM_SAMPLES >= first else change(sample)

    return Head(head.model, make)


WRONG_COUNTS: dict[str, tuple[Head, Any, int]] = {
    "tokens, not shifted": (HEADS["Llama"], ab.tokens(shift=False), 0),
    "samples, not shifted tokens": (HEADS["Llama"], ab.samples(), 0),
    "tokens, not samples": (HEADS["ViT"], lambda batch: batch["labels"].sum() + 1, 0),
    "samples, not tokens": (HEADS["BERT, tokens"], ab.samples(), 0),
    "samples, not a sum": (HEADS["wav2vec2, sum"], ab.samples(), 0),
    "padding, not samples": (HEADS["BERT, classes"], lambda batch: batch["input_ids"].numel(), 0),
    "samples, not tokens, late": (
        late(HEADS["BERT, tokens"], lambda sample: {**sample, "labels": sample["labels"].clamp(min=0)}),
        ab.samples(),
        1,
    ),
    "tokens, not shifted, late": (
        late(
            HEADS["Llama"], lambda sample: {**sample, "labels": torch.cat([torch.tensor([-100]), sample["labels"][1:]])}
        ),
        ab.tokens(shift=False),
        1,
    ),
}


@pytest.mark.parametrize("options", [{}, {"effective_batch_size": 12}], ids=str)
@pytest.mark.parametrize("name", WRONG_COUNTS)
def test_a_wrong_count(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """A `count=` of other items is refused before the update of the first step in which it shows."""
    head, count, num_steps = WRONG_COUNTS[name]
    run = Run(head, tmp_path, train_sampling_strategy="sequential")

    with raises(LossError, "wrong_count"):
        ab.exact(run.trainer, count=count, **options).train()
    assert len(run.steps) == num_steps


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["Llama", "BERT, tokens", "BERT, classes"])
def test_right_counts(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The items that the probe finds are accepted as `count=`, also where losses are rounded, and of single samples."""
    items, _, _ = EXPECTED[name]
    counts = {"samples": ab.samples(), "tokens": ab.tokens(shift=False), "shifted tokens": ab.tokens()}
    head = HEADS[name]
    for size in (1, 3):
        run = Run(Head(lambda: head.model().to(dtype), head.sample), tmp_path, per_device_train_batch_size=size)
        run.model.to(dtype)
        ab.exact(run.trainer, count=counts[items]).train()
        assert dtype == torch.bfloat16 or run.worst_error() < BOUND


def forecast(generator: torch.Generator, length: int) -> Sample:
    """Return a past and a future, of which some values are missing in longer samples."""
    past, future = torch.randn(10, generator=generator).double(), torch.randn(4, generator=generator).double()
    observed = torch.ones(4).double()
    observed[: length % 4] = 0
    return {
        "past_values": past,
        "past_time_features": torch.linspace(0, 1, 10).double()[:, None],
        "past_observed_mask": torch.ones(10).double(),
        "future_values": future,
        "future_time_features": torch.linspace(1, 2, 4).double()[:, None],
        "future_observed_mask": observed,
    }


def forecaster() -> nn.Module:
    """Return a model of time series, whose loss is a mean over observed values."""
    sizes: dict[str, Any] = {
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "d_model": 16,
    }
    sizes |= {"prediction_length": 4, "context_length": 8, "num_time_features": 1, "lags_sequence": [1, 2]}
    rates = dict.fromkeys(
        ["dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop", "decoder_layerdrop"], 0.0
    )
    config = hf.TimeSeriesTransformerConfig(**sizes, **rates)
    return hf.TimeSeriesTransformerForPrediction(config)  # type: ignore[no-any-return]


@pytest.mark.parametrize("options", [{}, {"effective_batch_size": 12}], ids=str)
def test_masks_that_occur_late(options: dict[str, Any], tmp_path: Path) -> None:
    """A loss over observed values, of which the first samples have all, is exact or refused in later steps."""

    def seen(sample: Sample) -> Sample:
        return {**sample, "future_observed_mask": torch.ones(4).double()}

    numbers = itertools.count()

    def late_masks(generator: torch.Generator, length: int) -> Sample:
        sample = forecast(generator, length)
        return sample if next(numbers) % NUM_SAMPLES >= 12 else seen(sample)

    run = Run(Head(forecaster, late_masks), tmp_path, train_sampling_strategy="sequential")
    with raises(LossError, "unknown_items"):
        ab.exact(run.trainer, **options).train()
    assert len(run.steps) == 1

    run = Run(Head(forecaster, late_masks), tmp_path, train_sampling_strategy="sequential")
    ab.exact(run.trainer, count=lambda batch: batch["future_observed_mask"].sum(), **options).train()
    assert run.worst_error(windows=run.effective_batches(12, shuffle=False)) < BOUND


def router(**options: Any) -> Head:
    """Return a mixture of experts."""
    llama = HEADS["Mixtral"].model().config.to_dict()  # type: ignore[union-attr, operator]
    return Head(lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**{**llama, **options})), HEADS["Mixtral"].sample)


def beyond(generator: torch.Generator, length: int) -> Sample:
    """Return a question whose answer is sometimes beyond the text."""
    sample = question(generator, length)
    return sample if length % 3 else {**sample, "end_positions": torch.tensor(99)}


def of_own_length(generator: torch.Generator, length: int) -> Sample:
    """Return a question without padding."""
    return {**question(generator, length), "input_ids": question(generator, length)["input_ids"][:length]}


def with_vectors(generator: torch.Generator, length: int) -> Sample:
    """Return a question as vectors."""
    vectors = torch.randn(20, WIDTH, generator=generator).double()
    return {"inputs_embeds": vectors, **positions(generator, length)}


def with_pixels(generator: torch.Generator, length: int) -> Sample:
    """Return a question about an image, whose answer is a range of its parts."""
    return {"pixel_values": torch.randn(20, 4, generator=generator).double(), **positions(generator, length)}


def positions(generator: torch.Generator, length: int) -> Sample:
    """Return the first and last position of an answer."""
    return {key: value for key, value in question(generator, length).items() if key != "input_ids"}


class VisualAnswers(nn.Module):
    """A model that answers a question about an image by two of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(
        self, pixel_values: torch.Tensor, start_positions: torch.Tensor, end_positions: torch.Tensor, **_: Any
    ) -> dict[str, torch.Tensor]:
        """Return the mean of two losses."""
        first, last = self.layer(pixel_values).unbind(-1)
        losses = map(nn.functional.cross_entropy, (first, last), (start_positions, end_positions))
        return {"loss": sum(losses, torch.zeros((), dtype=first.dtype)) / 2}


@pytest.mark.parametrize("size", [None, 13])
def test_questions_without_text(size: int | None, tmp_path: Path) -> None:
    """Answers are positions of vectors, or of an input whose length is unknown; then `count=` declares them valid."""
    visual = Head(VisualAnswers, with_pixels)
    with raises(LossError, "unknown_length"):
        ab.exact(Run(visual, tmp_path).trainer, effective_batch_size=size).train()
    for head, count in ((Head(HEADS["BERT, questions"].model, with_vectors), None), (visual, ab.samples())):
        run = Run(head, tmp_path)
        ab.exact(run.trainer, effective_batch_size=size, count=count).train()
        assert run.worst_error(loss_of, run.effective_batches(size) if size else None) < BOUND


def loss_of(model: nn.Module, batch: Sample) -> torch.Tensor:
    """Return the loss in the output of a model."""
    return model(**batch)["loss"]  # type: ignore[no-any-return]


class InBatchLoss(nn.Module):
    """A model that compares the samples of a batch with each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Embedding(64, 8)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        """Return the loss of telling samples apart."""
        one = self.layer(input_ids).mean(1)
        return {"loss": nn.functional.cross_entropy(one @ one.T, torch.arange(len(one)))}


@pytest.mark.parametrize(
    ("head", "options", "error", "code"),
    [
        (router(output_router_logits=True), {}, UserError, "router_loss"),
        (HEADS["Llama"], {"auto_find_batch_size": True}, UserError, "auto_find_batch_size"),
        (Head(HEADS["BERT, questions"].model, beyond), {}, LossError, "ignored_positions"),
        (Head(HEADS["BERT, questions"].model, of_own_length), {}, LossError, "unequal_lengths"),
        (Head(InBatchLoss, classified), {}, LossError, "unknown_items"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_refusals(head: Head, options: dict[str, Any], error: type[UserError], code: str, tmp_path: Path) -> None:
    """What cannot be exact is refused by name, at the latest before the first update."""
    for size in (None, 13):
        run = Run(head, tmp_path, **options)
        with raises(error, code):
            ab.exact(run.trainer, effective_batch_size=size).train()
        assert not run.steps


def test_other_objects_and_second_calls(tmp_path: Path) -> None:
    """A trainer of another library, and a trainer that is exact already, are refused."""
    for other in (nn.Linear(1, 1), HEADS["Llama"].model()):
        with raises(UserError, "unsupported_trainer"):
            ab.exact(other)
    trainer = ab.exact(Run(HEADS["Llama"], tmp_path).trainer)
    with raises(UserError, "already_exact"):
        ab.exact(trainer)


@pytest.mark.parametrize(
    ("package", "version"),
    [("transformers", "5.22.2"), ("transformers", "5.25.0"), ("accelerate", "2.0"), ("trl", "2")],
)
def test_other_versions(package: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions without tests are refused, and the trainer stays as it was."""
    kind = type("Trainer", (hf.Trainer,), {"__module__": "trl.trainer"}) if package == "trl" else hf.Trainer
    trainer = Run(HEADS["Llama"], tmp_path, kind).trainer
    before = dict(vars(trainer))
    monkeypatch.setitem(sys.modules, package, SimpleNamespace(__version__=version))
    with raises(UserError, "unsupported_version"):
        ab.exact(trainer)
    assert vars(trainer) == before


class Segmenter(nn.Module):
    """A model that assigns a class to every pixel; pixels of class 255 do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 5, 1)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        """Return the mean over pixels."""
        return {"loss": nn.functional.cross_entropy(self.layer(pixel_values), labels, ignore_index=255)}


def segmented(generator: torch.Generator, length: int) -> Sample:
    """Return an image and the classes of its pixels."""
    labels = torch.randint(0, 5, (16, 16), generator=generator)
    labels[: length % 16] = 255
    return {**HEADS["ViT"].sample(generator, length), "labels": labels}


def num_pixels(batch: Any) -> torch.Tensor:
    """Return the number of pixels that count."""
    return (batch["labels"] != 255).sum()  # type: ignore[no-any-return]


class Reads(TorchDispatchMode):
    """Counts how often the host waits for a number of a tensor."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a read, and run the operator."""
        self.number += func is torch.ops.aten._local_scalar_dense.default  # noqa: SLF001 (the operator of `item()`)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("size", [None, 13])
def test_segmentation(size: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pixels of class 255 do not count, and no step but the first waits for a number of the device."""
    monkeypatch.setattr(ItemCounter, "settle", lambda _: None)  # on a device, it runs every 32 micro-batches
    run = Run(Head(Segmenter, segmented), tmp_path, max_steps=3)
    with raises(LossError, "unknown_items"):
        ab.exact(Run(Head(Segmenter, segmented), tmp_path).trainer, effective_batch_size=size).train()
    trainer = ab.exact(run.trainer, effective_batch_size=size, count=ab.tokens(ignore_index=255, shift=False))
    reads: dict[str, list[int]] = {"get_batch_samples": [], "compute_loss": []}

    def watched(name: str, method: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            with Reads() as mode:  # type: ignore[no-untyped-call]
                found = method(*args, **options)
            reads[name].append(mode.number)
            return found

        return call

    for name in reads:
        setattr(trainer, name, watched(name, getattr(trainer, name)))
    trainer.train()

    windows = run.effective_batches(size) if size else run.windows()
    assert run.worst_error(loss_of, windows) < BOUND
    if size is not None:  # the collate function of the tests reads the number of each sample, otherwise in advance
        assert reads["get_batch_samples"][1:] == [len(window) for window in windows[1:]]
    assert reads["compute_loss"] == [0] * (10 if size is None else 11)  # micro-batches of at most 3 samples


class Normalized(Segmenter):
    """A model that also normalizes by the statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 5, 1))  # type: ignore[assignment]


@pytest.mark.parametrize("options", [{}, {"effective_batch_size": 13}], ids=str)
def test_batch_norm_warns(options: dict[str, Any], tmp_path: Path) -> None:
    """BatchNorm, whose statistics are those of a micro-batch, raises a warning."""
    run = Run(Head(Normalized, segmented), tmp_path)

    with warns("batch_norm_by_micro_batch"):
        ab.exact(run.trainer, count=num_pixels, **options).train()


class OwnLoss(hf.Trainer):  # type: ignore[misc]
    """A trainer whose loss is a mean over samples that ignores the count, as in many scripts."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        """Return the mean over samples."""
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits, inputs["labels"])
        return (loss, outputs) if return_outputs else loss


class Preference(nn.Module):
    """A model whose loss compares it with its initial state, as DPO: at first, all samples have the same loss."""

    def __init__(self, *, has_adapter: bool) -> None:
        super().__init__()
        self.layer = nn.Embedding(64, 8)
        self.reference = copy.deepcopy(self.layer).requires_grad_(False)
        self.adapter = nn.Parameter(torch.zeros(8, 8)) if has_adapter else None
        self.bias = None if has_adapter else nn.Parameter(torch.zeros(8))
        if has_adapter:
            self.layer.requires_grad_(False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> Any:
        """Return the mean loss over samples."""
        hidden = self.layer(input_ids)
        hidden = hidden + (self.bias if self.adapter is None else hidden @ self.adapter)
        scores, expected = (
            (one.tanh() * attention_mask[..., None]).sum((1, 2)) for one in (hidden, self.reference(input_ids))
        )
        return hf.utils.ModelOutput(loss=nn.functional.softplus(expected - scores).mean())


class OwnModel(nn.Module):
    """A classifier that is no model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Embedding(64, 8), nn.Linear(8, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:
        """Return the mean loss over samples."""
        hidden = (self.layer(input_ids) * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)
        return hf.utils.ModelOutput(loss=nn.functional.cross_entropy(self.head(hidden), labels))


@pytest.mark.parametrize(
    ("head", "trainer_class"),
    [(HEADS["BERT, classes"], OwnLoss), (Head(OwnModel, classified), hf.Trainer)],
    ids=["compute_loss", "module"],
)
def test_losses_of_scripts(head: Head, trainer_class: type[Any], tmp_path: Path) -> None:
    """A trainer with its own `compute_loss`, and a plain module, become exact, also in a shorter last step."""
    plain, run = (Run(head, tmp_path, trainer_class) for _ in range(2))
    plain.trainer.train()
    ab.exact(run.trainer).train()

    assert plain.worst_error() > 1e-2
    assert run.worst_error() < BOUND


@pytest.mark.parametrize("has_adapter", [True, False])
def test_losses_that_are_equal_at_first(has_adapter: bool, tmp_path: Path) -> None:
    """If all samples have the same loss, parameters are changed to find its items, and restored."""
    run = Run(Head(lambda: Preference(has_adapter=has_adapter), classified), tmp_path)
    ab.exact(run.trainer).train()

    assert run.worst_error() < BOUND
    assert all(torch.equal(value, run.initial[name]) for name, value in run.model.state_dict().items())
