"""`ab.exact(trainer, effective_batch_size=...)`: each step of a Trainer is one effective batch."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.data.indexed import sample_order
from anybatch.errors import BatchSizeError, DataError, UserError
from tests.integrations.heads import HEADS, Head, Sample, collate, hf, samples_of
from tests.integrations.trainer_runs import MICRO_BATCH_SIZE, NUM_SAMPLES, STEPS, Run
from tests.raising import raises

pytest.importorskip("accelerate", reason="needs the extra anybatch[transformers]")

SIZE = 13  # 29 samples: steps of 13, 13 and 3, in micro-batches of at most 3
BOUND = 1e-12
FAST = ("GPT-2", "BERT, tokens", "BERT, classes")


@pytest.fixture(autouse=True)
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models compute their losses in float64: they call `logits.float()`."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def trained(run: Run, size: int = SIZE, **options: Any) -> Run:
    """Train with effective batches."""
    ab.exact(run.trainer, effective_batch_size=size).train(**options)
    return run


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in HEADS])
def test_steps_have_the_gradient_of_the_effective_batch(name: str, tmp_path: Path) -> None:
    """Each step has the gradient and logs the loss of its samples in one batch; the last step has the rest."""
    run = trained(Run(HEADS[name], tmp_path))
    windows = run.effective_batches(SIZE)
    numbers = [entry["epoch"] for entry in run.trainer.state.log_history if "loss" in entry]

    assert [len(window) for window in windows] == [13, 13, 3]
    assert run.worst_error(windows=windows) < BOUND
    if "sum" not in name:
        assert run.losses() == pytest.approx(run.losses_of(windows), rel=1e-6)  # the Trainer adds losses in float32
    assert (run.trainer.state.global_step, run.trainer.state.max_steps) == (3, 3)
    assert numbers == pytest.approx([1 / 3, 2 / 3, 1.0])


def test_token_budgets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a token budget, micro-batches have similar lengths and few tokens, and the gradient is the same."""
    run = Run(HEADS["Llama"], tmp_path)
    budget, sizes = 4 * max(len(sample["input_ids"]) for sample in run.samples), list[tuple[int, ...]]()
    run.model.register_forward_pre_hook(
        lambda _, __, batch: sizes.append(tuple(batch["input_ids"].shape)) if torch.is_grad_enabled() else None,
        with_kwargs=True,
    )
    ab.exact(run.trainer, effective_batch_size=SIZE, micro_batch_size=ab.token_budget(budget)).train()

    assert max(rows * columns for rows, columns in sizes) <= budget
    assert max(rows for rows, _ in sizes) > MICRO_BATCH_SIZE
    assert run.worst_error(windows=run.effective_batches(SIZE)) < BOUND
    assert "split by length" in capsys.readouterr().out


def test_lengths_of_a_token_budget(tmp_path: Path) -> None:
    """A collator's `pad_to_multiple_of` counts; numbers of samples, and a budget without a step's size, are refused."""
    for remove in (False, True):
        run = Run(HEADS["Llama"], tmp_path, remove_unused_columns=remove)
        run.trainer.data_collator.pad_to_multiple_of = 1_000
        with raises(BatchSizeError, "sample_too_long"):
            ab.exact(run.trainer, effective_batch_size=SIZE, micro_batch_size=ab.token_budget(999)).train()
    for options in ({"micro_batch_size": 4, "effective_batch_size": 4}, {"micro_batch_size": ab.token_budget(999)}):
        with raises(UserError, "micro_batch_size"):
            ab.exact(Run(HEADS["Llama"], tmp_path).trainer, **options)


def test_the_split_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first step prints how it is split, and which batch size it replaces, if that is another one."""
    trained(Run(HEADS["BERT, classes"], tmp_path))
    printed = capsys.readouterr().out
    trained(Run(HEADS["BERT, classes"], tmp_path), MICRO_BATCH_SIZE * STEPS)

    assert "13 samples = 1 rank x 5 micro-batches x 3" in printed
    assert f"(instead of 1 x {STEPS} x {MICRO_BATCH_SIZE} = 12)" in printed
    assert f"gradient would have been {STEPS} times as large" in printed
    assert "instead of" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "num_steps"),
    [
        ({"num_train_epochs": 1.5}, 5),
        ({"num_train_epochs": 3}, 9),
        ({"max_steps": 4}, 4),
        ({"dataloader_drop_last": True}, 2),
    ],
    ids=str,
)
def test_steps_and_epochs_count_effective_batches(options: dict[str, Any], num_steps: int, tmp_path: Path) -> None:
    """Epochs, parts of epochs and `max_steps` count effective batches."""
    steps_per_epoch = 2 if "dataloader_drop_last" in options else 3
    run = trained(Run(HEADS["BERT, classes"], tmp_path, **options))
    state = run.trainer.state

    windows = [
        window for window in run.effective_batches(SIZE, epochs=3) if len(window) == SIZE or steps_per_epoch == 3
    ]
    assert (state.global_step, state.max_steps) == (num_steps, num_steps)
    assert state.epoch == pytest.approx(num_steps / steps_per_epoch)
    assert run.worst_error(windows=windows[:num_steps]) < BOUND
    assert run.trainer.get_total_train_batch_size(run.trainer.args) == SIZE


class Watch(hf.TrainerCallback):  # type: ignore[misc]
    """Counts calls of a callback."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Note the beginning of a step."""
        self.calls.append("begin")

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Note the update."""
        self.calls.append("update")

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        """Note the end of a micro-batch."""
        self.calls.append("substep")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note the end of a step."""
        self.calls.append("end")


def test_callbacks_clipping_and_tokens(tmp_path: Path) -> None:
    """Callbacks see steps, the norm is that of the effective batch, and the tokens of all micro-batches are counted."""
    watch = Watch()
    run = trained(
        Run(HEADS["Llama"], tmp_path, callbacks=[watch], max_grad_norm=1e9, include_num_input_tokens_seen="non_padding")
    )
    norms = [entry["grad_norm"] for entry in run.trainer.state.log_history if "grad_norm" in entry]
    expected = [math.sqrt(sum(float(grad.square().sum()) for grad in step.values())) for step in run.steps]

    assert watch.calls == ["begin", "update", "end"] * 3
    assert norms == pytest.approx(expected, rel=1e-6)
    assert run.trainer.state.num_input_tokens_seen == sum(len(sample["input_ids"]) for sample in run.samples)
    assert run.trainer.state.total_flos > 0


def test_clipping_acts_on_the_norm_of_the_effective_batch(tmp_path: Path) -> None:
    """One step equals a plain step with all samples in one batch, clipped once."""
    run = trained(Run(HEADS["BERT, masked"], tmp_path, max_grad_norm=0.5, learning_rate=0.1), NUM_SAMPLES)
    alone = run.head.model().double()
    alone.load_state_dict(run.initial)
    alone(**collate(run.samples)).loss.backward()
    norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
    torch.optim.SGD(alone.parameters(), lr=0.1).step()

    assert norm > 0.5
    assert run.trainer.state.log_history[0]["grad_norm"] == pytest.approx(float(norm))
    expected = torch.cat([value.double().flatten() for value in alone.state_dict().values()])
    assert float((run.weights() - expected).norm() / expected.norm()) < BOUND


def test_samples_without_targets_add_nothing(tmp_path: Path) -> None:
    """A micro-batch whose labels are all masked adds nothing to gradient and loss, instead of NaN."""

    def half_empty(generator: torch.Generator, length: int) -> Sample:
        sample = HEADS["BERT, tokens"].sample(generator, length)
        return sample if length % 2 else {**sample, "labels": torch.full_like(sample["labels"], -100)}

    options: dict[str, Any] = {"per_device_train_batch_size": 1, "logging_nan_inf_filter": False}
    run = trained(Run(Head(HEADS["BERT, tokens"].model, half_empty), tmp_path, **options))
    windows = run.effective_batches(SIZE)

    assert run.worst_error(windows=windows) < BOUND
    assert run.losses() == pytest.approx(run.losses_of(windows), rel=1e-6)


def test_label_smoothing(tmp_path: Path) -> None:
    """Label smoothing changes the loss, but not its divisor."""
    run = trained(Run(HEADS["Llama"], tmp_path, label_smoothing_factor=0.1))

    def loss(model: nn.Module, batch: Sample) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        targets = batch["labels"][:, 1:].flatten()
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets, label_smoothing=0.1)

    in_float32 = 0.1 * torch.finfo(torch.float32).eps  # in which the Trainer adds the smoothed part
    assert run.worst_error(loss, run.effective_batches(SIZE)) < in_float32


@pytest.mark.slow
def test_workers_load_the_same_samples(tmp_path: Path) -> None:
    """With worker processes, the steps have the same samples, in every epoch."""
    run = trained(Run(HEADS["BERT, tokens"], tmp_path, num_train_epochs=2, dataloader_num_workers=2))

    assert run.worst_error(windows=run.effective_batches(SIZE, epochs=2)) < BOUND


def test_sequential_order_and_seeds(tmp_path: Path) -> None:
    """Sequential data keep their order, and `data_seed` is the seed of the order if it is given."""
    run = trained(Run(HEADS["BERT, classes"], tmp_path, train_sampling_strategy="sequential"))
    seeded = trained(Run(HEADS["BERT, classes"], tmp_path, data_seed=5))
    order = sample_order(NUM_SAMPLES, seed=5, epoch=0, shuffle=True).tolist()

    assert run.worst_error(windows=run.effective_batches(SIZE, shuffle=False)) < BOUND
    windows = [[seeded.samples[number] for number in order[start : start + SIZE]] for start in range(0, 29, SIZE)]
    assert seeded.worst_error(windows=windows) < BOUND


def test_groups_of_similar_length(tmp_path: Path) -> None:
    """`group_by_length` decides the order, and each sample is used once."""
    run = Run(HEADS["BERT, classes"], tmp_path, train_sampling_strategy="group_by_length")
    run.trainer.processing_class = None
    trained(run)
    numbers = list(dict.fromkeys(run.seen))  # the first few are also loaded to find out which items count

    assert sorted(numbers) == list(range(NUM_SAMPLES))
    windows = [[run.samples[number] for number in numbers[start : start + SIZE]] for start in range(0, 29, SIZE)]
    assert run.worst_error(windows=windows) < BOUND
    lengths = [len(run.samples[number]["input_ids"]) for number in numbers]
    assert lengths[0] == max(lengths)
    assert lengths[:6] == sorted(lengths[:6], reverse=True)


def test_evaluation_and_schedules_that_need_it(tmp_path: Path) -> None:
    """Evaluation during training is unchanged, and a schedule that follows it is stepped with its loss."""
    runs, schedules = {}, []
    held_out = samples_of(HEADS["BERT, tokens"], 7)
    evaluation: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}
    for size in (None, SIZE):
        run = Run(HEADS["BERT, tokens"], tmp_path, eval_dataset=held_out, **evaluation)
        run.trainer.lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(run.trainer.optimizer)
        schedules.append(run.trainer.lr_scheduler)
        ab.exact(run.trainer, effective_batch_size=size).train()
        runs[size] = {entry["eval_loss"] for entry in run.trainer.state.log_history if "eval_loss" in entry}

    assert runs[SIZE] == runs[None]
    assert [schedule.last_epoch for schedule in schedules] == [3, 3]


def test_losses_that_are_not_finite_are_left_out_of_the_log(tmp_path: Path) -> None:
    """`logging_nan_inf_filter` replaces the loss of a step that is not finite by the average since the last log."""

    class Nan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
            is_bad = self.training and bool((labels > 9).any())
            loss = nn.functional.mse_loss(self.layer(input_ids)[:, 0], labels)
            return {"loss": loss * math.nan if is_bad else loss}

    def sample(generator: torch.Generator, length: int) -> dict[str, torch.Tensor]:
        del length
        return {
            "input_ids": torch.rand(3, generator=generator).double(),
            "labels": torch.randn((), generator=generator).double(),
        }

    run = Run(Head(Nan, sample), tmp_path)
    run.samples[0]["labels"] = torch.tensor(10.0).double()
    trained(run)
    assert all(map(math.isfinite, run.losses()))
    filtered = Run(Head(Nan, sample), tmp_path, logging_nan_inf_filter=False)
    filtered.samples[0]["labels"] = torch.tensor(10.0).double()
    trained(filtered)
    assert any(map(math.isnan, filtered.losses()))


class OwnLoader(hf.Trainer):  # type: ignore[misc]
    """A trainer with a loader of its own, as in many scripts."""

    def get_train_dataloader(self) -> Any:
        """Return a loader whose collate function differs from the trainer's."""
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=2, shuffle=True, collate_fn=collate)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Call the trainer's own step."""
        assert len(inputs["input_ids"]) <= MICRO_BATCH_SIZE
        return super().training_step(model, inputs, num_items_in_batch)


def test_methods_of_subclasses_are_called(tmp_path: Path) -> None:
    """A subclass keeps its loader's data and collate function, and its step runs for each micro-batch."""
    run = trained(Run(HEADS["BERT, tokens"], tmp_path, OwnLoader))

    assert run.worst_error(windows=run.effective_batches(SIZE)) < BOUND
    assert not run.seen


class Stream(torch.utils.data.IterableDataset[Any]):
    """Samples without numbers."""

    def __iter__(self) -> Any:
        """Yield nothing."""
        return iter(())


class OwnBatches(hf.Trainer):  # type: ignore[misc]
    """A trainer that chooses its batches, as those of sentence-transformers do."""

    def get_batch_sampler(self) -> None:
        """Do nothing."""


def test_refusals(tmp_path: Path) -> None:
    """Sizes below 1, streams, other orders of batches and epochs without a step are refused by code."""
    for size in (0, -1, 2.5):
        with pytest.raises(BatchSizeError):
            ab.exact(Run(HEADS["Llama"], tmp_path).trainer, effective_batch_size=size)  # type: ignore[arg-type]
    with raises(UserError, "batch_rebalance"):
        trained(Run(HEADS["Llama"], tmp_path, train_sampling_strategy="batch_rebalance"))
    with raises(UserError, "own_batches"):
        trained(Run(HEADS["Llama"], tmp_path, OwnBatches))
    run = Run(HEADS["Llama"], tmp_path, max_steps=2)
    run.trainer.train_dataset = Stream()
    with raises(DataError, "iterable_data"):
        trained(run)
    run = Run(HEADS["Llama"], tmp_path, dataloader_drop_last=True)
    with raises(DataError, "no_step"):
        trained(run, 30)
    assert not run.steps


@pytest.fixture
def without_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tqdm start no thread for the progress bar of a saved model."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)


@pytest.mark.slow
@pytest.mark.usefixtures("without_monitor")
def test_resuming_with_other_steps_is_refused(tmp_path: Path) -> None:
    """A checkpoint within an epoch of other steps is refused, or samples would be lost; at its end, any size works."""

    def run(size: int | None, **options: Any) -> Run:
        made = Run(HEADS["BERT, classes"], tmp_path, save_strategy="steps", save_steps=1, num_train_epochs=2, **options)
        if size is not None:
            ab.exact(made.trainer, effective_batch_size=size)
        return made

    run(10).trainer.train()  # 3 steps in an epoch
    for size in (15, 29):
        with raises(UserError, "other_effective_batches"):
            run(size).trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    resumed = run(10)
    resumed.trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.trainer.state.global_step == 6
    other = run(12)  # 3 steps too
    other.trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert other.trainer.state.global_step == 6
    assert set(other.seen) == set(range(NUM_SAMPLES))


@pytest.mark.usefixtures("without_monitor")
def test_resuming_from_the_trainer_alone_is_refused(tmp_path: Path) -> None:
    """The trainer alone has another order of samples."""
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
    Run(HEADS["BERT, classes"], tmp_path, **options).trainer.train()
    run = Run(HEADS["BERT, classes"], tmp_path, **options)

    with raises(UserError, "other_effective_batches"):
        trained(run, resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
