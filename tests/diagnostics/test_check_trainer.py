"""`ab.check(trainer)`: the gradients of a Trainer's first steps, alone and after `ab.exact`, and causes of errors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.cli.main import main
from anybatch.diagnostics import check_loop
from anybatch.diagnostics.check_report import TOLERANCES
from anybatch.diagnostics.trainer_check import check_made_trainer
from anybatch.errors import LoopError, UserError
from tests.integrations.heads import BERT, HEADS, Head, Sample, classified, collate, hf, samples_of
from tests.raising import raises

pytest.importorskip("accelerate", reason="needs the extra anybatch[transformers]")

pytestmark = pytest.mark.slow
MICRO_BATCH_SIZE = 3
STEPS = 4


def make_trainer(
    head: Head,
    folder: Path,
    trainer_class: type[Any] = hf.Trainer,
    collator: Callable[[list[Sample]], Sample] = collate,
    **options: Any,
) -> Any:
    """Return a trainer of a small model."""
    torch.manual_seed(1)
    arguments = {
        "per_device_train_batch_size": MICRO_BATCH_SIZE,
        "gradient_accumulation_steps": STEPS,
        "use_cpu": True,
        "remove_unused_columns": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    args = hf.TrainingArguments(str(folder), **{**arguments, **options})
    return trainer_class(head.model(), args, collator, samples_of(head, 29))


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("Llama", []),
        ("GPT-2", ["wrong_total"]),
        ("BERT, tokens", ["not_divided"]),
        ("BERT, questions", ["mean_of_means"]),
        ("wav2vec2, sum", []),
    ],
)
def test_the_cause_is_named(name: str, codes: list[str], tmp_path: Path) -> None:
    """A trainer with a wrong divisor is not equal, with its cause, and exact after `ab.exact`."""
    report = check_made_trainer(lambda: make_trainer(HEADS[name], tmp_path))

    assert [finding.code for finding in report.findings] == codes
    assert report.verdict == ("not equal" if codes else "exact"), str(report)
    assert report.exact is not None
    assert report.exact.verdict == "exact"
    assert [split.sizes for split in report.splits] == [(3, 3, 3, 3), (3, 2)]


def test_the_factor_is_measured(tmp_path: Path) -> None:
    """A model that ignores the divisor has a gradient that is larger by the number of micro-batches."""
    report = check_made_trainer(lambda: make_trainer(HEADS["BERT, classes"], tmp_path))

    assert report.splits[0].error == pytest.approx(STEPS - 1)
    assert "4 times too large" in report.findings[0].observation
    assert "after ab.exact(trainer)" in str(report)


def test_the_trainer_does_not_change(tmp_path: Path) -> None:
    """Weights, gradients, arguments, callbacks and generators are as before, and training gives the same weights."""
    trained = []
    for is_checked in (False, True):
        trainer = make_trainer(HEADS["BERT, classes"], tmp_path, max_steps=2)
        weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        attributes, args, state = dict(vars(trainer)), dict(vars(trainer.args)), torch.get_rng_state()
        callbacks = list(trainer.callback_handler.callbacks)
        if is_checked:
            ab.check(trainer)
            assert torch.equal(state, torch.get_rng_state())
            assert vars(trainer) == attributes
            assert vars(trainer.args) == args
            assert trainer.callback_handler.callbacks == callbacks
            assert all(torch.equal(value, weights[name]) for name, value in trainer.model.state_dict().items())
            assert not any(parameter.grad is not None for parameter in trainer.model.parameters())
        trainer.train()
        trained.append(trainer.model.state_dict())
    assert all(torch.equal(value, trained[1][name]) for name, value in trained[0].items())


def test_losses_in_float32_are_reported(tmp_path: Path) -> None:
    """`ab.check` does not patch `logits.float()`, and names the dtype of the loss; the command computes in float64."""
    as_float = torch.Tensor.float
    trainer = make_trainer(HEADS["Llama"], tmp_path)
    report = ab.check(trainer)

    assert report.equal
    assert report.precision == "float64, but the model computes its loss in float32"
    assert report.tolerance == TOLERANCES[torch.float32]
    assert check_made_trainer(lambda: trainer).precision == "float64"
    assert torch.Tensor.float is as_float


class Fused(nn.Module):
    """A classifier that adds products in float32, as the kernels of TRL do, so `float()` must not return float64."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Embedding(64, 8), nn.Linear(8, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:
        """Return the loss."""
        hidden, zeros = (
            (self.layer(input_ids) * attention_mask[..., None]).sum(1),
            torch.zeros(len(labels), 3, dtype=torch.float32),
        )
        return {"loss": F.cross_entropy(torch.addmm(zeros, hidden.float(), self.head.weight.float().T), labels)}


def test_kernels_that_need_float32(tmp_path: Path) -> None:
    """A model that fails with losses in float64 is checked with losses in float32."""
    report = check_made_trainer(lambda: make_trainer(Head(Fused, classified), tmp_path))

    assert report.precision == "float64, but the model computes its loss in float32"
    assert [finding.code for finding in report.findings] == ["mean_of_means"]
    assert report.exact is not None
    assert report.exact.verdict == "equal up to rounding"


def test_dropout_is_fixed(tmp_path: Path) -> None:
    """Dropout does not depend on the split, so gradients can be compared."""
    options = {**BERT, "hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2, "num_labels": 3}
    head = Head(lambda: hf.BertForSequenceClassification(hf.BertConfig(**options)), classified)
    report = check_made_trainer(lambda: make_trainer(head, tmp_path))

    assert report.exact is not None
    assert report.exact.verdict == "exact", str(report)


class OwnModel(nn.Module):
    """A classifier with BatchNorm, or with a loss that compares samples, which does not divide by the count."""

    def __init__(self, *, has_norm: bool) -> None:
        super().__init__()
        self.layer, self.head = nn.Embedding(64, 8), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8) if has_norm else None

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:
        """Return the loss."""
        hidden = (self.layer(input_ids) * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)
        if self.norm is not None:
            return {"loss": F.cross_entropy(self.head(self.norm(hidden)), labels)}
        return {"loss": F.cross_entropy(hidden @ hidden.T, torch.arange(len(hidden)))}


@pytest.mark.parametrize(("has_norm", "code"), [(True, "batch_norm"), (False, "couples_samples")])
def test_samples_that_depend_on_each_other(has_norm: bool, code: str, tmp_path: Path) -> None:
    """No weights of micro-batches make BatchNorm or a loss across samples exact; `ab.exact` refuses by name."""
    report = ab.check(make_trainer(Head(lambda: OwnModel(has_norm=has_norm), classified), tmp_path))

    assert report.findings[0].code == code
    assert not report.equal
    assert has_norm or report.findings[-1].code == "refused"


class FirstCountsTwice(hf.Trainer):  # type: ignore[misc]
    """A trainer that doubles the loss of the first micro-batch of every step."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, num_items_in_batch: Any = None, **options: Any) -> Any:
        """Return the loss, twice as large if no gradient has been computed since the last update."""
        is_first = num_items_in_batch is not None and all(parameter.grad is None for parameter in model.parameters())
        loss = super().compute_loss(model, inputs, *args, num_items_in_batch=num_items_in_batch, **options)
        return 2 * loss if is_first else loss


class Clips(hf.Trainer):  # type: ignore[misc]
    """A trainer that changes gradients after each micro-batch."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Clip the gradients by value."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        nn.utils.clip_grad_value_(model.parameters(), 1e-4)
        return loss


@pytest.mark.parametrize(("trainer_class", "code"), [(Clips, "unexplained"), (FirstCountsTwice, "uneven_weights")])
def test_other_causes(trainer_class: type[Any], code: str, tmp_path: Path) -> None:
    """Uneven weights, and a gradient that is no sum over micro-batches, are named too."""
    report = ab.check(make_trainer(HEADS["Llama"], tmp_path, trainer_class))
    assert [finding.code for finding in report.findings] == [code], str(report)


def test_an_exact_trainer_is_exact(tmp_path: Path) -> None:
    """A trainer after `ab.exact` is checked as it is."""
    report = check_made_trainer(lambda: ab.exact(make_trainer(HEADS["BERT, classes"], tmp_path)))

    assert report.verdict == "exact"
    assert report.exact is None


def random_collate(samples: list[Sample]) -> Sample:
    """Mask labels at random, with numpy's generator."""
    import numpy as np  # noqa: PLC0415 (of this test only)

    batch = collate(samples)
    batch["labels"][:, np.random.randint(2, 5)] = -100
    return batch


def test_refusals(tmp_path: Path) -> None:
    """Objects other than trainers, and random collate functions, are refused by name."""
    with raises(UserError, "unsupported_trainer"):
        ab.check(nn.Linear(1, 1))
    with raises(UserError, "random_collate"):
        ab.check(make_trainer(HEADS["Llama"], tmp_path, collator=random_collate))
    with raises(LoopError, "uses_trainer"):
        check_loop(script)


def script() -> None:
    """Train, as a script does."""
    hf.Trainer(HEADS["Llama"].model(), hf.TrainingArguments("out")).train()


SCRIPT = """
from pathlib import Path
from transformers import Trainer
from tests.diagnostics.test_check_trainer import HEADS, make_trainer

def train():
    trainer: Trainer = make_trainer(HEADS["{head}"], Path("{folder}"), Trainer)
    trainer.train()
    raise AssertionError("was trained")
"""


@pytest.mark.parametrize(
    ("option", "head", "status"),
    [("--trainer", "BERT, classes", 8), ("--trainer", "Llama", 0), ("--loop", "BERT, classes", 8)],
)
def test_command(option: str, head: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command checks the trainer that a script would train, and its exit status is the verdict of the trainer."""
    file = tmp_path / f"script_{option.strip('-')}_{status}.py"
    file.write_text(SCRIPT.format(head=head, folder=tmp_path), encoding="utf-8")
    assert main(["check", option, f"{file}:train"]) == status
    assert "after ab.exact(trainer)" in capsys.readouterr().out


def test_command_takes_one_thing() -> None:
    """A recipe and a trainer together are refused."""
    assert main(["check", "digits", "--trainer", "mine.py:train"]) == 2
