"""Effective batches inside TRL's trainers, which gather metrics over ranks in every micro-batch."""

import importlib
import inspect
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import anybatch as ab
from anybatch.core.tensors import relative_error
from anybatch.data.indexed import sample_order
from anybatch.errors import UserError
from anybatch.testing import run_ranks
from tests.integrations.heads import LLAMA, hf
from tests.integrations.trainer_runs import gradients, join_ranks
from tests.raising import raises

trl = pytest.importorskip("trl", reason="needs trl")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")

pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL
KINDS = ("SFT", "DPO", "Reward")
NUM_SAMPLES = 28  # steps of 13, 13 and 2
SIZE = 13
BOUND = 1e-12


@pytest.fixture(autouse=True)
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models compute their losses in float64, and progress bars start no thread."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)


@cache
def compute_in_float64() -> None:
    """Compile TRL's fused loss, which sums in float32, again in float64."""
    kernel, users = importlib.import_module("trl.kernels.chunked_logprob"), importlib.import_module("trl.trainer.utils")
    source = inspect.getsource(kernel).replace("torch.float32", "torch.float64").replace(".float()", ".double()")
    exec(compile(source, str(kernel.__file__), "exec"), vars(kernel))  # noqa: S102 (a copy of TRL's own source)
    vars(users)["_ChunkedLogProbFunction"] = kernel.ChunkedLogProbFunction


def make_tokenizer() -> Any:
    """Return a tokenizer of 64 words."""
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{n}" for n in range(61))])}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))  # noqa: S106 (a word)
    raw.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=raw, **special)


def make_data(kind: str) -> Any:
    """Return prompts with completions, or with pairs of them."""
    generator = torch.Generator().manual_seed(0)

    def text(low: int, high: int) -> str:
        length = int(torch.randint(low, high, (1,), generator=generator))
        return " ".join(f"w{int(word)}" for word in torch.randint(0, 61, (length,), generator=generator))

    rows = [
        {"prompt": text(2, 8), "completion": " " + text(2, 12), "rejected": " " + text(2, 12)}
        for _ in range(NUM_SAMPLES)
    ]
    if kind == "SFT":
        return datasets.Dataset.from_list([{key: row[key] for key in ("prompt", "completion")} for row in rows])
    return datasets.Dataset.from_list([{**row, "chosen": row.pop("completion")} for row in rows])


def make_model(kind: str) -> nn.Module:
    """Return a small Llama in float64."""
    torch.manual_seed(1)
    options = {**LLAMA, "eos_token_id": 1, "bos_token_id": None}
    if kind == "Reward":
        model: nn.Module = hf.LlamaForSequenceClassification(hf.LlamaConfig(**options, num_labels=1)).double()
    else:
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**options)).double()
    return model


def make_trainer(kind: str, folder: Path, **options: Any) -> Any:
    """Return a trainer with micro-batches of at most 3 samples."""
    model = make_model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    common: dict[str, Any] = {
        "per_device_train_batch_size": 3,
        "num_train_epochs": 1,
        "use_cpu": True,
        "max_grad_norm": 0.0,
    }
    common |= {"report_to": [], "logging_steps": 1, "disable_tqdm": True, "save_strategy": "no", "bf16": False}
    args = getattr(trl, f"{kind}Config")(str(folder), **common, gradient_checkpointing=False, max_length=64, **options)
    return getattr(trl, f"{kind}Trainer")(
        model=model,
        args=args,
        train_dataset=make_data(kind),
        processing_class=make_tokenizer(),
        **({"ref_model": make_model(kind)} if kind == "DPO" else {}),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
    )


class Outcome(NamedTuple):
    """The largest error of a step, the micro-batch size afterwards, and the logs of the steps."""

    error: float
    micro_batch_size: int
    logs: list[dict[str, float]]


def run_trainer(kind: str, folder: Path, failing_rank: int | None, micro_batch: int) -> Outcome:
    """Train with effective batches; a rank runs out of memory in a micro-batch of the second step."""
    compute_in_float64()
    options = {}
    if dist.is_initialized():
        join_ranks()
        options["ddp_backend"] = "gloo"
    trainer = make_trainer(kind, folder, **options)
    steps: list[dict[str, torch.Tensor]] = []
    trainer.optimizer.register_step_pre_hook(lambda *_: steps.append(gradients(trainer.model)))
    num_calls = 0

    def count(*_: Any) -> None:
        nonlocal num_calls
        num_calls += torch.is_grad_enabled() and trainer.model.training and trainer.state.global_step == 1
        if num_calls == micro_batch and trainer.args.process_index == failing_rank:
            handle.remove()
            message = "planted"
            raise torch.OutOfMemoryError(message)

    handle = trainer.model.model.register_forward_hook(count)  # TRL replaces the model's own forward
    ab.exact(trainer, effective_batch_size=SIZE).train()
    loader = trainer.callback_handler.train_dataloader
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Outcome(worst_error(kind, folder, steps, loader, options), loader.dataset.micro_batch_size, logs)


def worst_error(
    kind: str, folder: Path, steps: list[dict[str, torch.Tensor]], loader: Any, options: dict[str, Any]
) -> float:
    """Return the largest error of a step's gradient against TRL's own loss of its samples in one batch."""
    order = sample_order(NUM_SAMPLES, seed=42, epoch=0, shuffle=True).tolist()
    source, errors = loader.dataset.loader, []
    for number, found in enumerate(steps):
        host = make_trainer(kind, folder, **options)
        host.model.train()
        # Every rank has all samples here.
        vars(host.accelerator).update(gather=lambda value: value, gather_for_metrics=lambda value: value)
        rows = [source.dataset[sample] for sample in order[number * SIZE : (number + 1) * SIZE]]
        host.compute_loss(host.model, host._prepare_inputs(source.collate(rows))).backward()  # noqa: SLF001
        errors.append(relative_error(found, gradients(host.model)))
    return max(errors)


def run_all(kinds: Sequence[str], folder: Path, failing_rank: int | None) -> dict[str, Outcome]:
    """Train each kind of trainer."""
    return {kind: run_trainer(kind, folder, failing_rank, 2) for kind in kinds}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_one_rank(kind: str, tmp_path: Path) -> None:
    """The steps are exact, also after an out-of-memory error."""
    plain, failed = (run_trainer(kind, tmp_path, rank, 2) for rank in (None, 0))

    assert max(plain.error, failed.error) < BOUND
    assert (plain.micro_batch_size, failed.micro_batch_size) == (3, 2)


@pytest.mark.ranks
@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    """The steps are exact and count each token once, also after an out-of-memory error on one rank."""
    outcomes = [run_ranks(2, run_all, KINDS, tmp_path, rank) for rank in (None, 1)]
    assert not any(outcome.error for of_ranks in outcomes for outcome in of_ranks), outcomes
    for of_ranks in outcomes:
        assert all(outcome.value[kind].error < BOUND for outcome in of_ranks for kind in KINDS), of_ranks
    plain, failed = (of_ranks[0].value for of_ranks in outcomes)
    for kind in KINDS:
        assert (plain[kind].micro_batch_size, failed[kind].micro_batch_size) == (3, 2)
        tokens = [[entry.get("num_tokens") for entry in one[kind].logs] for one in (plain, failed)]
        assert tokens[0][0] == tokens[1][0] is not None


def test_trainers_that_generate_are_refused(tmp_path: Path) -> None:
    """GRPO compares the samples that it generates within its own batches."""
    args = trl.GRPOConfig(str(tmp_path), num_generations=2, per_device_train_batch_size=2, use_cpu=True, report_to=[])
    trainer = trl.GRPOTrainer(
        make_model("SFT"),
        lambda completions, **_: [0.0] * len(completions),
        args,
        make_data("SFT"),
        processing_class=make_tokenizer(),
    )
    with raises(UserError, "generates_samples"):
        ab.exact(trainer, effective_batch_size=SIZE)
