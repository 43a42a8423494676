"""The recipe `finetune`: a causal language model on passages of different lengths, padded and packed."""

from pathlib import Path
from typing import Any

import pytest
import torch

import anybatch as ab
from anybatch.engine.arguments import Hardware, TrainSpec
from anybatch.recipes.finetune import finetune
from anybatch.recipes.planning.subjects import subject_of_job
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
    """A transformers Llama has one gradient unsplit, cut by number, and by length, padded or packed."""
    expected = gradients(texts, "padded", None)
    budget = ab.token_budget(90)
    for layout, size in (("padded", 3), ("auto", 3), ("padded", budget), ("packed", budget), ("auto", budget)):
        assert relative_error(gradients(texts, layout, size), expected) <= TOLERANCE


@pytest.mark.slow
def test_a_saved_model_is_loaded(texts: Path, tmp_path: Path) -> None:
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


def test_a_plan_uses_the_longest_sample(texts: Path) -> None:
    """A plan uses the longest sample, not the first."""
    job = finetune(folder=texts, longest=40)
    sample = subject_of_job(job).sample

    assert sample["input_ids"].shape == (1, max(len(one["input_ids"]) for one in job.dataset()))
