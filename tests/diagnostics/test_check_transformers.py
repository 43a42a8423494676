"""`check` on transformers models with random weights, their own losses declared correctly or not."""

from typing import Any

import pytest
import torch
from torch import Tensor

import anybatch as ab
from anybatch.diagnostics import check

transformers = pytest.importorskip("transformers", reason="needs transformers, which the extra anybatch[test] brings")

LENGTHS = torch.tensor([6, 2, 5, 6, 3, 4, 6, 2])
WIDTH, NUM_WORDS = 6, 17


def own_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss that the model's own head computes."""
    loss: Tensor = model(**batch).loss
    return loss


def words() -> dict[str, Tensor]:
    """Return sentences with padding that is not a target."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(1, NUM_WORDS, (len(LENGTHS), WIDTH), generator=random)
    there = torch.arange(WIDTH) < LENGTHS[:, None]
    return {"input_ids": ids, "attention_mask": there.long(), "labels": ids.where(there, -100)}


def causal() -> Any:
    """Return a small Llama."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=NUM_WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return transformers.LlamaForCausalLM(config)


def sequence_to_sequence() -> Any:
    """Return a small T5."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=NUM_WORDS, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


MODELS = {
    "causal": (causal, words, ab.mean_over_tokens(own_loss), ab.mean_over_samples(own_loss)),
    "sequence to sequence": (
        sequence_to_sequence,
        words,
        ab.mean_over_tokens(own_loss, shift=False),
        ab.mean_over_tokens(own_loss),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_own_loss(name: str) -> None:
    """A model's own loss, declared correctly, is equal in every cut; otherwise the fix is printed."""
    make, batch, right, wrong = MODELS[name]

    report = check(make(), right, batch(), micro_batch_sizes=[3])
    assert report.equal, str(report)

    report = check(make(), wrong, batch(), micro_batch_sizes=[3])
    assert [finding.code for finding in report.findings if finding.breaks_equality] == ["loss_declaration"]
    assert f"shift={name == 'causal'}" in next(f.change for f in report.findings if f.breaks_equality)
