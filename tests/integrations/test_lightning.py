"""`Trainer(callbacks=[ab.exact(effective_batch_size=...)])`: each step of Lightning is one effective batch, exactly."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

import anybatch as ab
from anybatch.errors import BatchSizeError, DataError, DoesNotFitError, LossError, UserError
from anybatch.testing import run_ranks
from tests.architecture.leak_police import new_groups, take_snapshot
from tests.extras import skip_without
from tests.raising import raises, warns
from tests.ranks_fixture import selected

skip_without("lightning", "anybatch[lightning]")

import lightning.pytorch as pl  # noqa: E402 (skipped without it)
import torchmetrics  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy  # noqa: E402

from tests.integrations.lightning_runs import (  # noqa: E402
    LOSSES,
    MICRO,
    NUM_SAMPLES,
    QUIET,
    SIZE,
    Module,
    Sample,
    as_rank,
    collate,
    expected_ids,
    fit,
    loader,
    make_net,
    samples,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"
    ),  # of Lightning, with torch 2.13
]
BOUND = 1e-14
SEED = 3
MEAN_NUMBER = sum(range(NUM_SAMPLES)) / NUM_SAMPLES


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Set the seed from which the order of samples is derived."""
    torch.manual_seed(SEED)


def seeded_fit(module: Module, *callbacks: Any, **options: Any) -> pl.Trainer:
    """Train with a fixed order of samples."""
    torch.manual_seed(SEED)  # the module has set another seed
    return fit(module, *callbacks, **options)


def epochs(number: int) -> list[list[int]]:
    """Return the samples of each step of some epochs."""
    return [ids for epoch in range(number) for ids in expected_ids(SEED, epoch)]


@pytest.mark.parametrize("name", LOSSES)
def test_steps_have_the_gradient_of_one_batch(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Lightning alone weights short rows and a short last step wrongly; with the callback, each step is exact."""
    plain, module = Module(name), Module(name)
    options = {**QUIET, "devices": 1, "max_epochs": 1, "accumulate_grad_batches": 4}
    pl.Trainer(**options).fit(plain, loader(num_workers=1, shuffle=False, persistent_workers=True))
    trainer = seeded_fit(module, max_epochs=2)

    assert max(plain.errors) > 0.1
    assert max(module.errors) < BOUND
    assert module.ids == epochs(2)
    assert (trainer.global_step, trainer.current_epoch) == (6, 2)
    assert f"the loss is a mean over {name}." in capsys.readouterr().out


def test_token_budgets() -> None:
    """With a token budget, steps are the same as with a number of samples."""
    module, shapes = Module("tokens"), list[torch.Size]()
    module.net.register_forward_pre_hook(lambda _, words: shapes.append(words[0].shape))
    exact = ab.exact(effective_batch_size=SIZE, micro_batch_size=ab.token_budget(24), lengths="words")
    torch.manual_seed(SEED)
    pl.Trainer(callbacks=[exact], **QUIET, devices=1, max_epochs=1).fit(module, loader())

    assert max(module.errors) < BOUND
    assert module.ids == epochs(1)
    assert max(shape[0] for shape in shapes) > MICRO


class Data(pl.LightningDataModule):  # type: ignore[misc]
    """A data module; the attribute is read by Lightning's search for a batch size."""

    batch_size = MICRO

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the training loader."""
        return loader()


class WithLoader(Module):
    """A module that has its loader."""

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the training loader, with workers."""
        return loader(num_workers=1)


@pytest.mark.parametrize("source", ["data module", "module", "batch sampler"])
def test_sources_of_the_loader(source: str) -> None:
    """The loader may come from the module, from a data module, or have a batch sampler and an order of its own."""
    trainer = pl.Trainer(callbacks=[ab.exact(effective_batch_size=SIZE)], **QUIET, devices=1, max_epochs=1)
    module = WithLoader() if source == "module" else Module()
    sampler = BatchSampler(SequentialSampler(range(NUM_SAMPLES)), MICRO, drop_last=True)
    data: Any = DataLoader(samples(), batch_sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]
    torch.manual_seed(SEED)
    trainer.fit(module, {"data module": Data(), "module": None, "batch sampler": data}[source])

    in_order = [list(range(13)), list(range(13, 26))]  # the last batch is dropped
    assert module.ids == (in_order if source == "batch sampler" else epochs(1))
    assert max(module.errors) < BOUND


class Scheduled(Module):
    """A module with learning rates that change every step or epoch, validation, and an estimate of its steps."""

    interval = "step"

    def configure_optimizers(self) -> Any:
        self.estimated = self.trainer.estimated_stepping_batches
        self.validated: list[int] = []
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.interval}}

    def validation_step(self, batch: Sample) -> None:
        """Record that validation has its own batches."""
        assert len(batch["words"]) == 9
        self.log("val_loss", self.loss(self.net, batch), batch_size=9)
        self.validated.append(self.trainer.global_step)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return a loader of three batches."""
        return loader(batch_size=9, shuffle=False)


@pytest.mark.filterwarnings("ignore:The 'val_dataloader' does not have many workers")
@pytest.mark.parametrize(
    ("interval", "options", "rates", "validated"),
    [
        ("step", {"max_epochs": 2}, [0.5**n for n in range(1, 7)], [3, 6]),
        ("epoch", {"max_epochs": 2}, [0.5] * 3 + [0.25] * 3, [3, 6]),
        ("step", {"max_steps": 4, "max_epochs": -1, "val_check_interval": 2}, [0.5**n for n in range(1, 5)], [2]),
    ],
    ids=["steps", "epochs", "max_steps"],
)
def test_the_loop_counts_effective_batches(
    interval: str, options: dict[str, Any], rates: list[float], validated: list[int]
) -> None:
    """Schedulers, max_epochs, max_steps, validation and the estimated number of steps count effective batches."""
    module = Scheduled()
    module.interval = interval
    trainer = seeded_fit(module, num_sanity_val_steps=1, **options)

    assert module.rates == rates
    assert module.estimated == trainer.global_step == len(rates)
    assert module.validated == [0] + [step for step in validated for _ in range(3)]
    assert max(module.errors) < BOUND


def test_logs_are_those_of_the_effective_batch() -> None:
    """`self.log` and `outputs` have the loss of the effective batch, and the epoch's mean that of all its tokens."""
    module = Module(lr=0.0)
    trainer = seeded_fit(module)
    expected = LOSSES["tokens"](make_net(), collate(samples())).item()

    assert [float(outputs["loss"]) for outputs in module.outputs] == pytest.approx(module.losses, rel=BOUND)
    assert float(trainer.callback_metrics["train_loss_step"]) == pytest.approx(module.losses[-1], rel=BOUND)
    assert float(trainer.callback_metrics["train_loss_epoch"]) == pytest.approx(expected, rel=BOUND)


class Logging(Module):
    """Logs in several ways, and returns a dictionary."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.accuracy = torchmetrics.MeanMetric()
        self.batches: list[int] = []

    def training_step(self, batch: Sample, batch_idx: int) -> Any:
        size = len(batch["words"])
        self.accuracy(batch["words"][:, 0].double())
        self.log("number", batch["words"][:, 0].double().mean(), batch_size=size)
        self.log_dict({"samples": float(size), "largest": 0.0}, reduce_fx="sum")
        self.log("maximum", batch["words"][:, 0].max().double(), reduce_fx=torch.max)
        self.log("metric", self.accuracy, on_step=False, on_epoch=True)
        return {"loss": super().training_step(batch, batch_idx), "size": size}

    def on_train_batch_end(self, outputs: Any, batch: Sample, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.batches.append(len(batch["words"]))


@pytest.mark.parametrize("fail_at", [None, (0, 2, "forward"), (0, 5, "backward"), (0, 10, "forward")], ids=str)
def test_out_of_memory(fail_at: tuple[int, int, str] | None) -> None:
    """A step that ran out of memory is repeated in smaller micro-batches; logs and metrics see each sample once."""
    module = Logging(fail_at=fail_at, lr=0.0)
    trainer = seeded_fit(module)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    ids = epochs(1)

    assert max(module.errors) < BOUND
    assert module.ids == ids
    assert module.calls == 11 if fail_at is None else module.calls > 11
    assert [outputs["size"] for outputs in module.outputs][-1] == 1
    assert max(module.batches) <= MICRO
    assert (logged["samples"], logged["maximum"]) == (1, ids[2][0])
    assert logged["metric"] == MEAN_NUMBER
    expected = LOSSES["tokens"](make_net(), collate(samples())).item()
    assert logged["train_loss_epoch"] == pytest.approx(expected, rel=BOUND)


def test_a_micro_batch_without_targets_adds_nothing() -> None:
    """The loss of a micro-batch without targets is NaN and left out, also in the logs."""
    module = Module()
    for number in range(0, NUM_SAMPLES, 2):
        module.samples[number]["labels"].fill_(-100)
    trainer = seeded_fit(module, data=loader(module.samples, batch_size=1), size=9)

    assert max(module.errors) < BOUND
    assert float(trainer.callback_metrics["train_loss_step"]) == pytest.approx(module.losses[-1], rel=BOUND)
    assert [float(outputs["loss"]) for outputs in module.outputs] == pytest.approx(module.losses, rel=BOUND)


def test_a_sample_that_does_not_fit() -> None:
    """If micro-batches of one sample do not fit, an error says so."""
    module = Module()
    module.training_step = lambda *_: module.run_out()  # type: ignore[method-assign]
    with pytest.raises(DoesNotFitError):
        fit(module)


class Save(pl.Callback):  # type: ignore[misc]
    """Saves a checkpoint when a step, or the epoch that contains it, ends."""

    def __init__(self, path: Path, step: int, *, at_epoch_end: bool = False) -> None:
        self.path, self.step, self.at_epoch_end = path, step, at_epoch_end

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and not self.at_epoch_end:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and self.at_epoch_end:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(
    ("step", "at_epoch_end", "options"),
    [
        (5, False, {}),
        (3, False, {}),
        (3, True, {}),
        (3, True, {"max_steps": 8}),
        (4, False, {"max_steps": 8}),
        (2, True, {"limit_train_batches": 2}),
    ],
    ids=["within an epoch", "last batch", "end of epoch", "end of epoch, max_steps", "max_steps", "limited"],
)
def test_resuming(step: int, at_epoch_end: bool, options: dict[str, Any], tmp_path: Path) -> None:
    """A resumed run has the samples and weights of one that was not interrupted, also if the seed is another one."""
    whole, rest = Module(), Module()
    seeded_fit(whole, Save(tmp_path / "saved", step, at_epoch_end=at_epoch_end), max_epochs=3, **options)
    torch.manual_seed(SEED + 1)
    fit(rest, max_epochs=3, ckpt_path=tmp_path / "saved", **options)

    assert rest.ids == whole.ids[step:]
    assert torch.equal(rest.weights(), whole.weights())


def test_checkpoints_of_other_batches(tmp_path: Path) -> None:
    """Within an epoch, a checkpoint of another effective batch size or of Lightning alone is refused."""
    seeded_fit(Module(), Save(tmp_path / "saved", 2))
    pl.Trainer(callbacks=[Save(tmp_path / "alone", 2)], max_epochs=1, devices=1, **QUIET).fit(
        Module(), loader(num_workers=1, persistent_workers=True)
    )
    for name, size in (("saved", 5), ("alone", SIZE)):
        with raises(UserError, "other_effective_batches"):
            fit(Module(), ckpt_path=tmp_path / name, size=size)


class Clipped(Module):
    """A module that compares its clipped gradient and its update with PyTorch's."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        twin = make_net()
        twin.load_state_dict(self.net.state_dict())
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        reference = torch.optim.SGD(twin.parameters(), lr=self.lr)
        LOSSES["tokens"](twin, collate([samples()[number] for number in self.ids[-1]])).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
        reference.step()
        torch.testing.assert_close(list(self.net.parameters()), list(twin.parameters()), rtol=1e-13, atol=0.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=self.lr)


def test_clipping() -> None:
    """`gradient_clip_val` clips the gradient of the effective batch."""
    module = Clipped()
    seeded_fit(module, gradient_clip_val=0.01)

    assert len(module.errors) == 3


class Hooked(Module):
    """A module with hooks for batches and checkpointed activations."""

    def __init__(self) -> None:
        super().__init__()
        self.transfers: list[str] = []
        self.inner = self.loss
        self.loss = lambda net, batch: self.inner(
            lambda words: torch.utils.checkpoint.checkpoint(net, words, use_reentrant=False),  # type: ignore[arg-type]
            batch,
        )

    def on_before_batch_transfer(self, batch: Sample, dataloader_idx: int) -> Sample:  # noqa: ARG002 (Lightning's)
        self.transfers.append("before")
        return batch

    def on_after_batch_transfer(self, batch: Sample, dataloader_idx: int) -> Sample:  # noqa: ARG002 (Lightning's)
        self.transfers.append("after")
        return {**batch, "words": batch["words"].clone()}


def test_hooks_and_checkpointed_activations() -> None:
    """Hooks for batches receive each micro-batch once; checkpointed activations change nothing."""
    module = Hooked()
    seeded_fit(module)

    assert module.transfers == ["before", "after"] * module.calls
    assert max(module.errors) < BOUND


def test_bfloat16() -> None:
    """With precision="bf16-mixed" the gradient is that of the whole batch, up to bfloat16's rounding."""
    module = Module(dtype=torch.float32)
    seeded_fit(module, precision="bf16-mixed")

    assert 1e-5 < max(module.errors) < 2e-2


def test_a_declared_count() -> None:
    """`count=` sets the divisor of a loss whose items cannot be found."""

    def weighted(net: nn.Module, batch: Sample) -> Tensor:
        numbers = batch["words"][:, 0] + 1.5
        losses = net(batch["words"])[:, 0].square().sum(1)
        return torch.as_tensor((losses * numbers).sum() / numbers.sum())

    module = Module()
    module.loss = weighted
    with raises(LossError, "unknown_items"):
        fit(module)
    module = Module()
    module.loss = weighted
    fit(module, count=lambda batch: (batch["words"][:, 0] + 1.5).sum())

    assert max(module.errors) < BOUND


@pytest.mark.parametrize(("loss", "count"), [("tokens", ab.samples()), ("samples", ab.tokens(shift=False))])
def test_a_wrong_count(loss: str, count: Any) -> None:
    """A `count=` of other items is refused before the first update."""
    module = Module(loss)
    before = module.weights()

    with raises(LossError, "wrong_count"):
        fit(module, count=count)
    assert torch.equal(module.weights(), before)


class Skipping(Module):
    """A module that returns no loss after some calls."""

    num_losses = 0

    def training_step(self, batch: Sample, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if self.calls < self.num_losses else None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Compare nothing."""


@pytest.mark.filterwarnings("ignore:.*returned `None`:UserWarning")
def test_micro_batches_without_a_loss() -> None:
    """A step without any loss changes nothing; a step of which only a part has a loss is refused."""
    module = Skipping()
    before = module.weights()
    seeded_fit(module)
    assert torch.equal(module.weights(), before)

    module = Skipping()
    module.num_losses = 2
    with raises(LossError, "skipped_micro_batch"):
        seeded_fit(module)
    assert torch.equal(module.weights(), before)


class Normalized(Module):
    """A module with a BatchNorm layer that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)


def test_batch_norm() -> None:
    """BatchNorm, whose statistics are those of a micro-batch, raises a warning."""
    with warns("batch_norm_by_micro_batch"):
        fit(Normalized())


class Stream(IterableDataset[int]):
    """Samples without numbers."""

    def __iter__(self) -> Iterator[int]:
        """Yield samples."""
        return iter(range(3))


class Numbers(Dataset[int]):
    """Samples that are their numbers."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return NUM_SAMPLES


class Manual(Module):
    """The three lines for manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def noted(self, net: nn.Module, batch: Sample) -> Tensor:
        """Return the loss, and note the samples of the step; the check of the loss has no gradient."""
        if torch.is_grad_enabled():
            self.seen.update(batch["words"][:, 0].tolist())
        return self.loss(net, batch)

    def on_fit_start(self) -> None:
        loss = ab.mean_over_tokens(self.noted, labels="labels", shift=False)
        self.engine = ab.Engine(self.net, self.optimizers().optimizer, loss, micro_batch_size=MICRO)
        self.optimizers().optimizer.register_step_pre_hook(lambda *_: self.on_before_optimizer_step(self.optimizers()))

    def training_step(self, batch: Sample) -> None:  # type: ignore[override]
        self.log("train_loss", self.engine.step(batch).loss)


def test_an_engine_in_training_step() -> None:
    """With manual optimization, an engine in `training_step` makes each step exact."""
    module = Manual()
    data = loader(batch_size=SIZE, num_workers=1, persistent_workers=True)
    pl.Trainer(max_epochs=1, devices=1, **QUIET).fit(module, data)

    assert max(module.errors) < BOUND
    assert [len(ids) for ids in module.ids] == [13, 13, 1]


class ByIterator(Module):
    """A module that loads its batches itself."""

    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return super().training_step(*next(dataloader_iter)[:2])


class SetsAccumulation(pl.Callback):  # type: ignore[misc]
    """A callback that changes accumulate_grad_batches."""

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.accumulate_grad_batches = 2


def concatenated() -> Any:
    """Return two loaders as one."""
    return pl.utilities.CombinedLoader([loader(), loader()])


@pytest.mark.parametrize(
    ("error", "code", "module", "options"),
    [
        (UserError, "manual_optimization", Manual, {}),
        (UserError, "dataloader_iter", ByIterator, {}),
        (UserError, "accumulate_grad_batches", Module, {"accumulate_grad_batches": 4}),
        (UserError, "accumulate_grad_batches", Module, {"callback": SetsAccumulation}),
        (
            UserError,
            "accumulation_callback",
            Module,
            {"callback": partial(pl.callbacks.GradientAccumulationScheduler, {1: 2})},
        ),
        (UserError, "accumulation_callback", Module, {"callback": pl.callbacks.BatchSizeFinder, "data": Data}),
        (
            UserError,
            "accumulation_callback",
            Module,
            {"callback": partial(pl.callbacks.StochasticWeightAveraging, 0.1)},
        ),
        (UserError, "overfit_batches", Module, {"overfit_batches": 2}),
        (UserError, "already_exact", Module, {"callback": partial(ab.exact, effective_batch_size=SIZE)}),
        (DataError, "no_step", Module, {"data": partial(loader, drop_last=True), "size": NUM_SAMPLES + 1}),
        (DataError, "not_one_loader", Module, {"data": concatenated}),
        (DataError, "iterable_data", Module, {"data": lambda: DataLoader(Stream())}),
        (DataError, "batch_sampler", Module, {"data": lambda: DataLoader(samples(), batch_sampler=[[0], [1]])}),  # type: ignore[arg-type]
        (
            DataError,
            "distributed_sampler",
            Module,
            {"data": lambda: loader(shuffle=None, sampler=DistributedSampler(Numbers(), 2, 0))},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore:.*(overfit|dataloader_iter|swa_lrs|Swapping scheduler):UserWarning")
def test_refusals(error: type[UserError], code: str, module: Callable[[], Module], options: dict[str, Any]) -> None:
    """What cannot be exact is refused by code, before the first update."""
    options = dict(options)
    data, callbacks = options.pop("data", loader), [options.pop("callback")()] if "callback" in options else []
    trained = module()
    with raises(error, code):
        fit(trained, *callbacks, data=data(), **options)

    assert not trained.ids


def test_refused_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing size, a size below 1, other versions, the other package and a missing package are refused by code."""
    with raises(UserError, "unsupported_trainer"):
        ab.exact()
    with pytest.raises(BatchSizeError):
        ab.exact(effective_batch_size=0)
    with raises(UserError, "unsupported_trainer"):
        ab.exact(pl.Trainer(**QUIET))
    callback = ab.exact(effective_batch_size=2)
    with raises(UserError, "pytorch_lightning"):
        callback.setup(object(), Module(), "fit")
    callback.setup(object(), Module(), "test")
    monkeypatch.setattr("lightning.__version__", "2.7.0")
    with raises(UserError, "unsupported_version"):
        ab.exact(effective_batch_size=2)
    monkeypatch.delitem(sys.modules, "anybatch.integrations.lightning")
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    with raises(UserError, "missing_package"):
        ab.exact(effective_batch_size=2)


def test_a_trainer_of_transformers_refuses_the_callback(tmp_path: Path) -> None:
    """A Trainer of transformers refuses the callback by code, when it is created or before its first step."""
    hf = pytest.importorskip("transformers")
    arguments = hf.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True)
    callback = ab.exact(effective_batch_size=SIZE)
    with raises(UserError, "not_lightning"):
        hf.Trainer(nn.Linear(1, 1), arguments, callbacks=[callback])
    trainer = hf.Trainer(nn.Linear(1, 1), arguments, train_dataset=[{"input": torch.zeros(1)}])
    trainer.add_callback(callback)
    with raises(UserError, "not_lightning"):
        trainer.train()


def test_a_trainer_can_be_used_again() -> None:
    """After a fit, the loop is Lightning's again, and a second fit with the callback is exact too."""
    trainer = pl.Trainer(callbacks=[ab.exact(effective_batch_size=SIZE)], max_epochs=1, devices=1, **QUIET)
    for _ in range(2):
        module = Module()
        trainer.fit_loop.epoch_progress.reset()
        trainer.fit(module, loader())
        assert max(module.errors) < BOUND
    assert "dataloader" not in vars(trainer.fit_loop._data_source)  # noqa: SLF001


FAILURES = {
    "first micro-batch of rank 0": (0, 1, "forward"),
    "second forward": (1, 2, "forward"),
    "first backward": (1, 1, "backward"),
    "last backward": (1, 3, "backward"),
    "second step": (0, 5, "forward"),
}
STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "metrics": lambda: "ddp",
    "unused parameters": lambda: "ddp_find_unused_parameters_true",
    "FSDP2": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    "FSDP2, bfloat16": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
}


class Counting(Module):
    """A module that notes the step of every reduction of DDP, which has one bucket."""

    def on_fit_start(self) -> None:
        self.reductions: list[int] = []

        def reduced(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
            self.reductions.append(len(self.ids))
            return allreduce_hook(None, bucket)  # type: ignore[arg-type]

        self.trainer.strategy.model.register_comm_hook(None, reduced)


def fit_on_a_rank(name: str) -> dict[str, Any]:
    """Train on this rank, and return what the tests compare."""
    options, is_sharded, is_bf16 = as_rank(), name.startswith("FSDP2"), name.endswith("bfloat16")
    options["strategy"] = STRATEGIES.get(name, STRATEGIES["ddp"])()
    options["precision"] = "bf16-mixed" if is_bf16 else "32-true"
    dtype = torch.float32 if is_bf16 else torch.float64
    kind = {"metrics": Logging, "ddp": Counting}.get(name, Module)
    module, before = kind(sync_dist=True, fail_at=FAILURES.get(name), shard=is_sharded, dtype=dtype), take_snapshot()
    trainer = seeded_fit(module, max_epochs=2, **options)
    return {
        "error": max(module.errors),
        "ids": module.ids,
        "steps": trainer.global_step,
        "losses": [float(outputs["loss"]) / loss for outputs, loss in zip(module.outputs, module.losses, strict=True)],
        "logged": float(trainer.callback_metrics["train_loss_step"]) / module.losses[-1],
        "kind": type(module.net[1].weight.data).__name__,
        "calls": module.calls,
        "reductions": getattr(module, "reductions", list(range(6))),
        "metric": float(trainer.callback_metrics.get("metric", MEAN_NUMBER)),
        "groups": [] if is_sharded else new_groups(before),  # a mesh of Lightning has groups
    }


def fit_all(names: list[str]) -> dict[str, dict[str, Any]]:
    """Train once for each name."""
    return {name: fit_on_a_rank(name) for name in names}


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> list[dict[str, dict[str, Any]]]:
    """Return the results of the selected tests, of two ranks."""
    found = run_ranks(2, fit_all, selected(request, "name"))
    assert not any(outcome.error for outcome in found), found
    return [outcome.value for outcome in found]


@pytest.mark.ranks
@pytest.mark.parametrize("name", [*STRATEGIES, *FAILURES])
def test_two_ranks(name: str, outcomes: list[dict[str, dict[str, Any]]]) -> None:
    """Two ranks have the gradient, samples and logged loss of one, with DDP or FSDP2, also after out of memory."""
    for outcome in (outcome[name] for outcome in outcomes):
        bound = 2e-2 if name.endswith("bfloat16") else BOUND
        assert outcome["error"] < bound
        assert outcome["ids"] == epochs(2)
        assert (outcome["steps"], outcome["metric"], outcome["groups"]) == (6, MEAN_NUMBER, [])
        assert outcome["reductions"] == list(range(6))
        assert outcome["kind"] == ("DTensor" if name.startswith("FSDP2") else "Tensor")
        assert [*outcome["losses"], outcome["logged"]] == pytest.approx([1.0] * 7, rel=bound)
        assert (outcome["calls"] > 14) == (name in FAILURES)


def resume_on_a_rank(folder: Path) -> list[tuple[list[list[int]], Tensor]]:
    """Save on two ranks, also with FSDP2, and resume; also a checkpoint of one rank. Return samples and weights."""
    runs = []
    for shard, saved, resumed in ((False, "two", "one"), (True, "sharded", "sharded")):
        strategy = STRATEGIES["FSDP2" if shard else "ddp"]
        whole, rest = Module(shard=shard), Module(shard=shard)
        seeded_fit(whole, Save(folder / saved, 5), max_epochs=3, **{**as_rank(), "strategy": strategy()})
        fit(rest, max_epochs=3, ckpt_path=folder / resumed, **{**as_rank(), "strategy": strategy()})
        runs += [(module.ids, module.weights()) for module in (whole, rest)]
    return runs


@pytest.mark.ranks
def test_resuming_on_another_number_of_ranks(tmp_path: Path) -> None:
    """A run that is resumed within an epoch, on two ranks instead of one or the reverse, has the same samples."""
    whole, rest = Module(), Module()
    seeded_fit(whole, Save(tmp_path / "one", 5), max_epochs=3)
    outcomes = run_ranks(2, resume_on_a_rank, tmp_path)
    assert not any(outcome.error for outcome in outcomes), outcomes
    fit(rest, max_epochs=3, ckpt_path=tmp_path / "two")

    assert rest.ids == whole.ids[5:]
    torch.testing.assert_close(rest.weights(), whole.weights(), rtol=1e-13, atol=1e-15)
    for outcome in outcomes:
        for ids, weights in outcome.value:
            assert ids == whole.ids[-len(ids) :]
            torch.testing.assert_close(weights, whole.weights(), rtol=1e-13, atol=1e-15)


def fit_with_a_static_graph() -> str:
    """Return the code of the error."""
    with pytest.raises(UserError) as caught:
        fit(Module(), **{**as_rank(), "strategy": DDPStrategy(static_graph=True)})
    return caught.value.code


@pytest.mark.ranks
def test_a_static_graph_is_refused() -> None:
    """DDP's static_graph, which needs a reduction in a fixed backward, is refused by code."""
    assert [outcome.value for outcome in run_ranks(1, fit_with_a_static_graph)] == ["static_graph"]


def run_out_with_fsdp(rank: int) -> None:
    """Run out of memory on one rank of a sharded model."""
    module = Module(shard=True, fail_at=(rank, 5, "forward"))
    fit(module, **{**as_rank(), "strategy": STRATEGIES["FSDP2"]()})


@pytest.mark.ranks
def test_out_of_memory_with_fsdp() -> None:
    """With FSDP2 on several ranks, an out-of-memory error ends the run on the rank, with an error that says so."""
    outcomes = run_ranks(2, run_out_with_fsdp, 1)

    assert all(outcome.error for outcome in outcomes)
    assert "CannotRedoError" in str(outcomes[1].error)
