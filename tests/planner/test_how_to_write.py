"""The lines to write for a plan's changes run together, unmodified, on the user's modules."""

import dataclasses
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anybatch.planner.budget import budget_of
from anybatch.planner.changes import code_of, named_change, sharded_in_bfloat16, strategy_change
from anybatch.planner.plan import make_plan
from tests.planner.test_combinations import Net, adamw, spec_of


def test_the_engine_is_made_last_and_once() -> None:
    """The lines of several changes create one engine, after its inputs, with all their arguments."""
    asked = ("bf16 autocast", "bf16 weights, split", "fused optimizer", "checkpointing")
    changes = [named_change(spec_of(), name) for name in asked]
    found: list[dict[str, Any]] = []

    def engine(*_: object, **given: Any) -> None:
        kinds = {one.dtype for one in names["model"].parameters()}
        wrapped = [isinstance(block.forward, partial) for block in names["model"].blocks]
        found.append({**given, "kinds": kinds, "wrapped": wrapped, "optimizer": names["optimizer"]})

    names: dict[str, Any] = {"model": Net(), "torch": torch, "ab": SimpleNamespace(Engine=engine), "optimizer": adamw}
    exec(code_of(changes).replace("lr=...", "lr=0.1"), names)  # noqa: S102 (our own lines)

    (made,) = found
    assert made["precision"] == "bf16"
    assert made["bf16_weights"] == "split"
    assert made["kinds"] == {torch.bfloat16}
    assert made["wrapped"] == [True] * 4
    assert made["optimizer"] is not adamw


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_written_strategies_match_the_plan(precision: str) -> None:
    """The lines spell out FSDP with bf16 gathers as planned under bf16; in float32 they use its name."""
    planned = sharded_in_bfloat16 if precision == "bf16" else "fsdp"
    names: dict[str, Any] = {"torch": torch, "ab": SimpleNamespace(Engine=lambda *_, **given: given)}
    exec(code_of([strategy_change("FSDP", planned)]), names)  # noqa: S102 (our own lines)

    written = names["engine"]["strategy"]
    if isinstance(planned, str):
        assert written == planned
    else:
        assert type(written) is type(planned())
        assert vars(written)["_sharding"] == vars(planned())["_sharding"]


@pytest.mark.parametrize(
    ("library", "loader"),
    [("transformers.models.bert.modeling_bert", "BertForMaskedLM"), ("diffusers.models.unets", "UNet2DConditionModel")],
)
def test_a_base_in_four_bits_of_a_library(library: str, loader: str) -> None:
    """A model from a library that loads in 4 bits uses its own class; a stand-in uses the class for its task."""
    kind = type(loader, (Net,), {"__module__": library})

    how = named_change(spec_of(kind), "LoRA of rank 2 on a base in 4 bits").how
    assert f"from {library.partition('.')[0]} import BitsAndBytesConfig, {loader}" in how
    assert f"model = {loader}.from_pretrained(..., quantization_config=four_bits)" in how

    stand_in = dataclasses.replace(spec_of(), called={"Block": "LlamaDecoderLayer", "blocks": "model.layers"})
    assert "AutoModelForCausalLM" in named_change(stand_in, "LoRA of rank 2 on a base in 4 bits").how


@pytest.mark.slow
def test_the_answer_prints_its_strategy() -> None:
    """The answer of a plan over several ranks includes its strategy, if one was chosen, in text and JSON."""
    spec = dataclasses.replace(spec_of(partial(Net, 256), sample=torch.zeros(1, 256)), world_size=2)
    stays = 16 * sum(parameter.numel() for parameter in Net(256).parameters()) // 2**20
    plan = make_plan(spec, budget_of(f"{1300 + stays * 3 // 4}MiB", world_size=2, headroom=0.0), 8, fit=True)

    assert plan.answer is not None
    best = plan.answer.best
    assert best is not None
    lines = code_of(best.changes).splitlines()
    assert best.strategy
    assert any(line.startswith("engine = ab.Engine(..., strategy=") for line in lines)
    assert [f"  {line}" for line in lines] == [line for line in str(plan).splitlines() if line[2:] in lines]
