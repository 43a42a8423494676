"""The recipe `finetune`: a causal language model on passages of different lengths, padded and packed."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import anybatch as ab
from anybatch.core.run_config import RunConfig
from anybatch.engine.arguments import Hardware, TrainSpec
from anybatch.recipes.finetune import finetune
from anybatch.recipes.planning.subjects import subject_of_job
from anybatch.recipes.start import start
from anybatch.recipes.text import Layout
from anybatch.testing import relative_error

transformers = pytest.importorskip("transformers")
TOLERANCE = 1e-12


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Return a folder of passages of 2 to 60 characters."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(12):
        passages = ["abcdefghij" * (number * place % 6) + "xyz" for place in range(4)]
        (folder / f"{number}.txt").write_text("\n\n".join(passages))
    return folder


def gradients(folder: Path, layout: Any, size: Any) -> dict[str, torch.Tensor]:
    """Return the gradient of the first effective batch in float64."""
    job = finetune(folder=folder, layout=layout, longest=40)
    torch.manual_seed(0)
    model = job.model()
    assert isinstance(model, torch.nn.Module)
    spec = TrainSpec(
        model=model.double(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=job.loss, check_loss=False
    )
    with ab.Engine.from_spec(spec, Hardware(micro_batch_size=size)) as engine:
        found = engine.gradients(next(iter(job.train_batches(effective_batch_size=16))))
    return {name: gradient for name, gradient in found.items() if gradient is not None}


@pytest.mark.slow
def test_padded_and_packed_give_one_gradient(texts: Path) -> None:
    """A transformers Llama has one gradient un-split, cut by number, and by length, padded or packed."""
    expected = gradients(texts, "padded", None)
    budget = ab.token_budget(90)
    for layout, size in (("padded", 3), ("auto", 3), ("padded", budget), ("packed", budget), ("auto", budget)):
        assert relative_error(gradients(texts, layout, size), expected) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["auto"])
def test_held_out_batches_are_within_the_budget(texts: Path, layout: Layout) -> None:
    """Held-out batches stay within the token budget, unless a single sample is longer, with the mean over tokens."""
    budget = 30
    job = finetune(folder=texts, layout=layout, longest=40)
    job = dataclasses.replace(job, evaluate=ab.Evaluation(dataset=job.dataset))  # the job's own have one length
    config = RunConfig(effective_batch_size=16, steps=1, micro_batch_tokens=budget)
    run = start(job, config, check_loss=False)
    model = run.engine.model
    assert isinstance(model, torch.nn.Module)
    data = job.dataset()
    with torch.no_grad():
        plain = [model(**{name: one[None] for name, one in sample.items()}, use_cache=False).loss for sample in data]
    counts = [len(sample["labels"]) - 1 for sample in data]
    expected = sum(float(value) * count for value, count in zip(plain, counts, strict=True)) / sum(counts)
    sizes: list[int] = []
    with model.register_forward_pre_hook(
        lambda _, __, given: sizes.append(given["input_ids"].numel()), with_kwargs=True
    ):
        found = run.evaluate()
    run.engine.close()

    assert found["loss"] == pytest.approx(expected, rel=1e-5)
    lengths = [len(sample["input_ids"]) for sample in data]
    assert sorted(size for size in sizes if size > budget) == sorted(length for length in lengths if length > budget)
    assert len(sizes) < len(lengths)


@pytest.mark.slow
def test_a_saved_model_is_taken(texts: Path, tmp_path: Path) -> None:
    """A folder with weights and a tokenizer is loaded as the model to train and its tokenizer."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers.utils.logging.disable_progress_bar()  # whose thread would stay alive
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "[PAD]": 1, "xyz": 2}, unk_token="[UNK]"))  # noqa: S106 (a word)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split("xyz", "isolated")
    tokeniser = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]")  # noqa: S106
    tokeniser.save_pretrained(tmp_path / "model")
    config = transformers.LlamaConfig(
        vocab_size=4, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    saved = transformers.LlamaForCausalLM(config)
    saved.save_pretrained(tmp_path / "model")

    job = finetune(tmp_path / "model", texts)
    model = job.model()
    assert isinstance(model, torch.nn.Module)
    assert model.training
    assert relative_error(dict(model.named_parameters()), dict(saved.named_parameters())) == 0.0
    assert {int(token) for sample in job.dataset() for token in sample["input_ids"]} == {0, 2}


def test_a_plan_is_of_the_longest_sample(texts: Path) -> None:
    """A plan uses the longest sample, not the first."""
    job = finetune(folder=texts, longest=40)
    sample = subject_of_job(job).sample

    assert sample["input_ids"].shape == (1, max(len(one["input_ids"]) for one in job.dataset()))
