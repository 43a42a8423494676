"""`ab.windows`: every optimizer step of an Accelerate script has the gradient of its effective batch."""

import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset

import anybatch as ab
from anybatch.core.tensors import relative_error
from anybatch.errors import DataError, LossError, UserError
from anybatch.testing import RankPool
from anybatch.testing.ranks import PoolError
from tests.architecture.leak_police import new_groups, take_snapshot
from tests.integrations.heads import BERT, HEADS, Head, Sample, collate, hf, samples_of
from tests.raising import raises, warns

accelerate = pytest.importorskip("accelerate", reason="needs the extra anybatch[accelerate]")

NUM_SAMPLES = 27
SIZES = [13, 13, 1]
MICRO_BATCH_SIZE = 3
BOUND = 1e-12
NAMES = ["Llama", "BERT, tokens", "BERT, classes"]
Gradients = dict[str, Tensor]
Loop = Callable[["Run", Any], None]


def forget_accelerator() -> None:
    """Remove the state that all accelerators of a process share."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001 (as Accelerate's own tests)
    accelerate.state.GradientState._reset_state()  # noqa: SLF001


@pytest.fixture(autouse=True)
def separate_accelerators(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin without an accelerator; compute losses in float64, although models call `logits.float()`."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    forget_accelerator()
    yield
    forget_accelerator()


def gradients(model: nn.Module) -> Gradients:
    """Return copies of all gradients, whole if they are sharded."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad.clone() for name, grad in found.items()}


class Run:
    """A script of Accelerate with a small model, and the gradients and samples of its steps."""

    def __init__(
        self,
        head: Head,
        *,
        rate: float = 0.0,
        prepare_loader: bool = False,
        dtype: torch.dtype = torch.float64,
        **options: Any,
    ) -> None:
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4, **options)
        torch.manual_seed(1)
        self.head, self.samples, self.steps, self.ids = head, samples_of(head, NUM_SAMPLES), [], []  # type: ignore[var-annotated]
        self.net: Any = head.model().to(dtype)
        self.initial = {name: value.clone() for name, value in self.net.state_dict().items()}
        self.losses: list[float] = []
        sgd = torch.optim.SGD(self.net.parameters(), lr=rate)
        sgd.register_step_pre_hook(lambda *_: self.steps.append(gradients(self.net)))
        schedule = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: 0.9**step)
        self.loader: Any = DataLoader(self.samples, MICRO_BATCH_SIZE, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]
        if prepare_loader:
            self.loader = self.accelerator.prepare(self.loader)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(self.net, sgd, schedule)

    def windows(self, **options: Any) -> Any:
        """Return the windows of the script."""
        return ab.windows(self.accelerator, self.loader, **{"effective_batch_size": SIZES[0], **options})

    def loss(self, batch: Sample) -> Tensor:
        """Return the model's own loss."""
        return self.model(**batch).loss  # type: ignore[no-any-return]

    def step(self) -> None:
        """Update, as published scripts do."""
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def references(self, loss: Callable[[nn.Module, Sample], Tensor] | None = None) -> list[tuple[Gradients, float]]:
        """Return the gradient and the loss of the samples of each step in one batch."""
        found = []
        for ids in self.ids:
            model = self.head.model().double().train()
            model.load_state_dict(self.initial)
            batch = collate([self.samples[number] for number in ids])
            value = loss(model, batch) if loss else model(**batch).loss
            value.backward()
            found.append((gradients(model), value.item()))
        return found


def iterate(run: Run, windows: Any) -> None:
    """Train micro-batch by micro-batch, with clipping in each."""
    for window in windows:
        for batch in window.micro_batches(run.model):
            run.accelerator.backward(window.scale(run.loss(batch), batch))
            run.accelerator.clip_grad_norm_(run.model.parameters(), 1e9)
            run.step()
        run.ids.append(window.ids)
        run.losses.append(float(window.loss()))


def call(run: Run, windows: Any) -> None:
    """Train window by window."""
    for window in windows:
        run.losses.append(float(window.backward(run.loss, run.model)))
        run.accelerator.clip_grad_norm_(run.model.parameters(), 1e9)
        run.step()
        run.ids.append(window.ids)


LOOPS: dict[str, Loop] = {"iterated": iterate, "backward": call}


def check(run: Run) -> None:
    """Check steps, samples, schedule, gradients and losses of an epoch."""
    assert [len(ids) for ids in run.ids] == SIZES
    assert sorted(number for ids in run.ids for number in ids) == list(range(NUM_SAMPLES))
    assert run.scheduler.scheduler.last_epoch == len(SIZES)
    assert run.accelerator.gradient_accumulation_steps == 4
    for found, value, (expected, loss) in zip(run.steps, run.losses, run.references(), strict=True):
        assert relative_error(found, expected) < BOUND
        assert value == pytest.approx(loss, rel=BOUND)


@pytest.mark.parametrize("prepare_loader", [False, True], ids=["loader", "prepared loader"])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", NAMES)
def test_one_rank(name: str, loop: str, prepare_loader: bool) -> None:
    """Each step has the gradient and the loss of its samples in one batch, and each sample is used once."""
    run = Run(HEADS[name], prepare_loader=prepare_loader)
    LOOPS[loop](run, run.windows())
    check(run)


def on_ranks(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function on this rank, with the variables that Accelerate reads; it must not leave process groups."""
    before = take_snapshot()
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # the group exists already
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    warnings.simplefilter("ignore")  # of DDP
    forget_accelerator()
    result = function(*args)
    assert new_groups(before) == []
    return result


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankPool]:
    """Two ranks that all tests of this module share."""
    with RankPool(2) as pool:
        yield pool


def epoch_on_a_rank(name: str, loop: str, prepare_loader: bool) -> tuple[Any, ...]:
    """Check an epoch with one reduction per step, and return the samples of its windows."""
    run, reductions = Run(HEADS[name], prepare_loader=prepare_loader), []

    def reduce(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        reductions.append(bucket.index())
        return allreduce_hook(group, bucket)

    run.model.register_comm_hook(None, reduce)
    assert run.accelerator.num_processes == 2
    LOOPS[loop](run, run.windows())
    check(run)
    assert reductions == [0] * len(SIZES)
    return tuple(run.ids)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("prepare_loader", [False, True], ids=["loader", "prepared loader"])
@pytest.mark.parametrize("loop", LOOPS)
def test_two_ranks(loop: str, prepare_loader: bool, two_ranks: RankPool) -> None:
    """The steps of two ranks have the samples, gradients and losses of one rank, and the schedule its steps."""
    found = [two_ranks.run(on_ranks, epoch_on_a_rank, name, loop, prepare_loader) for name in NAMES]

    run = Run(HEADS[NAMES[0]])
    assert {ids for ranks in found for ids in ranks} == {tuple(window.ids for window in run.windows())}


class FailingRun(Run):
    """A run whose loss runs out of memory once, on one rank."""

    def __init__(self, failure: tuple[int, str, int]) -> None:
        super().__init__(HEADS["BERT, tokens"])
        self.failure, self.num_calls = failure, 0

    def loss(self, batch: Sample) -> Tensor:
        """Return the loss; in one call on one rank, its forward or its backward runs out of memory."""
        rank, place, number = self.failure
        self.num_calls += 1
        if (self.accelerator.process_index, self.num_calls) != (rank, number):
            return super().loss(batch)
        if place == "forward":
            raise torch.OutOfMemoryError
        loss = super().loss(batch)
        loss.register_hook(out_of_memory)
        return loss


def out_of_memory(_: Tensor) -> None:
    """Fail as an allocation does."""
    raise torch.OutOfMemoryError


def out_of_memory_on_a_rank(*failure: Any) -> int:
    """Check an epoch with an out-of-memory error, and return the number of losses computed on this rank."""
    run = FailingRun(failure)
    call(run, run.windows())
    check(run)
    return run.num_calls


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("number", [1, 2, 3, 4, 7], ids=["first", "second", "last", "second window", "one sample"])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_out_of_memory(place: str, number: int, two_ranks: RankPool) -> None:
    """After an error in any micro-batch of one rank, both ranks repeat the window in smaller micro-batches."""
    if number == 7:
        with pytest.raises(PoolError, match="DoesNotFitError"), RankPool(2) as ranks:
            ranks.run(on_ranks, out_of_memory_on_a_rank, 1, place, number)
        return
    counts = two_ranks.run(on_ranks, out_of_memory_on_a_rank, 1, place, number)

    # Two windows with three micro-batches, or four after the error, and one with one.
    assert counts[1] == number + (8 if number < 4 else 4) + 1


def test_halved_size_is_kept() -> None:
    """After an out-of-memory error, later epochs with the same loader start with the smaller micro-batches."""
    run, sizes = FailingRun((0, "forward", 1)), list[int]()
    call(run, run.windows())
    loss = run.loss

    def noting(batch: Sample) -> Tensor:
        sizes.append(len(batch["labels"]))
        return loss(batch)

    run.loss = noting  # type: ignore[method-assign]
    call(run, run.windows(epoch=1))

    assert max(sizes) == (MICRO_BATCH_SIZE + 1) // 2


def test_clipping() -> None:
    """`clip_grad_norm_` clips the gradient of the effective batch, although the loop calls it in each micro-batch."""
    for loop in LOOPS.values():
        run = Run(HEADS["BERT, tokens"])
        run.accelerator.clip_grad_norm_ = clipped_to(run, 0.01)
        loop(run, run.windows())
        for found, (expected, _) in zip(run.steps, run.references(), strict=True):
            norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
            assert relative_error(found, {name: g * (0.01 / (norm + 1e-6)) for name, g in expected.items()}) < BOUND
        forget_accelerator()


def clipped_to(run: Run, limit: float) -> Callable[..., Any]:
    """Return a function that clips with another limit than the loops give."""
    clip = run.accelerator.clip_grad_norm_
    return lambda parameters, _: clip(parameters, limit)


def test_micro_batches_without_targets() -> None:
    """Micro-batches without targets, whose means are NaN, add nothing, before and after the kind of items is known."""
    for loop in LOOPS.values():
        run = Run(HEADS["BERT, tokens"])
        ids = next(iter(run.windows())).ids
        for number in (*ids[:3], *ids[6:9]):
            run.samples[number]["labels"].fill_(-100)
        loop(run, run.windows())
        check(run)
        forget_accelerator()


@pytest.mark.parametrize("loop", LOOPS)
def test_a_declared_count(loop: str) -> None:
    """`count=` declares the divisor of a loss with class weights, which is refused without it."""
    weights = torch.tensor([0.2, 1.0, 3.0]).double()

    def weighted(model: nn.Module, batch: Sample) -> Tensor:
        return nn.functional.cross_entropy(model(**batch).logits, batch["labels"], weights)

    class Weighted(Run):
        def loss(self, batch: Sample) -> Tensor:
            return weighted(self.model, batch)

    run = Weighted(HEADS["BERT, classes"])
    with raises(LossError, "class_weights"):
        LOOPS[loop](run, run.windows())
    assert not run.steps
    run.optimizer.zero_grad()
    LOOPS[loop](run, run.windows(count=lambda batch: weights[batch["labels"]].sum()))
    for found, (expected, _) in zip(run.steps, run.references(weighted), strict=True):
        assert relative_error(found, expected) < BOUND


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("name", "count"), [("BERT, tokens", ab.samples()), ("Llama", ab.tokens(shift=False)), ("wav2vec2, sum", None)]
)
def test_a_wrong_count(name: str, count: Any, loop: str) -> None:
    """A `count=` of other items is refused before the first update, and so are sums."""
    run = Run(HEADS[name])
    with raises(LossError, "wrong_count" if count else "unknown_items"):
        LOOPS[loop](run, run.windows(count=count))
    assert not run.steps


def test_several_losses_and_models() -> None:
    """Each loss of a micro-batch has its own items, and several models can share a loop or a window."""
    run = Run(HEADS["BERT, tokens"])
    head = nn.Linear(5, 1).double()
    other, optimizer = run.accelerator.prepare(head, torch.optim.SGD(head.parameters(), lr=0.0))

    def second_loss(model: nn.Module, batch: Sample) -> Tensor:
        inputs = nn.functional.one_hot(batch["input_ids"] % 5, 5) * batch["attention_mask"][..., None]
        return model(inputs.sum(1).double()).square().mean()  # type: ignore[no-any-return]

    found: list[Gradients] = []
    optimizer.optimizer.register_step_pre_hook(lambda *_: found.append(gradients(head)))
    for window in run.windows():
        run.ids.append(window.ids)
        for batch in window.micro_batches(run.model, other):
            run.accelerator.backward(window.scale(run.loss(batch), batch))
            run.accelerator.backward(window.scale(second_loss(other, batch), batch))
            run.step()
            optimizer.step()
            optimizer.zero_grad()
        for batch in window.micro_batches(other):
            run.accelerator.backward(window.scale(second_loss(other, batch), batch))
            optimizer.step()
            optimizer.zero_grad()
    assert [len(ids) for ids in run.ids] == SIZES
    for step, (expected, _) in zip(run.steps, run.references(), strict=True):
        assert relative_error(step, expected) < BOUND
    for ids, *steps in zip(run.ids, found[::2], found[1::2], strict=True):
        head.zero_grad()
        torch.stack([second_loss(head, collate([run.samples[number]])) for number in ids]).mean().backward()
        assert all(relative_error(step, gradients(head)) < BOUND for step in steps)


def forgets_scale(run: Run, windows: Any) -> None:
    """Leave out `window.scale`."""
    for window in windows:
        for batch in window.micro_batches(run.model):
            run.accelerator.backward(run.loss(batch))
            run.step()


def accumulates(run: Run, windows: Any) -> None:
    """Keep `accelerator.accumulate`."""
    for window in windows:
        for batch in window.micro_batches(run.model):
            with run.accelerator.accumulate(run.model):
                run.accelerator.backward(window.scale(run.loss(batch), batch))
                run.step()


def leaves_early(run: Run, windows: Any) -> None:
    """Leave a window before its last micro-batch."""
    for window in windows:
        for batch in window.micro_batches(run.model):
            run.accelerator.backward(window.scale(run.loss(batch), batch))
            break


def updates_early(run: Run, windows: Any) -> None:
    """Update with an optimizer that is not prepared."""
    for window in windows:
        for batch in window.micro_batches(run.model):
            run.accelerator.backward(window.scale(run.loss(batch), batch))
            run.optimizer.optimizer.step()


def clears_first(run: Run, windows: Any) -> None:
    """Clear gradients before the backward, also in the last micro-batch."""
    for window in windows:
        for batch in window.micro_batches(run.model):
            run.optimizer.zero_grad()
            run.accelerator.backward(window.scale(run.loss(batch), batch))
            run.optimizer.step()


def clears_always(run: Run, windows: Any) -> None:
    """Clear the gradients of each micro-batch."""
    for window in windows:
        for batch in window.micro_batches(run.model):
            run.accelerator.backward(window.scale(run.loss(batch), batch))
            run.model.zero_grad()


def never_clears(run: Run, windows: Any) -> None:
    """Do not clear the gradients of the window before."""
    for window in windows:
        for batch in window.micro_batches(run.model):
            run.accelerator.backward(window.scale(run.loss(batch), batch))
            run.optimizer.step()


def never_clears_after_call(run: Run, windows: Any) -> None:
    """Do not clear the gradients of the window before."""
    for window in windows:
        window.backward(run.loss, run.model)
        run.optimizer.step()


def scales_outside(run: Run, windows: Any) -> None:
    """Call `scale` without `micro_batches`."""
    for window in windows:
        window.scale(run.loss(collate(run.samples[:3])), {})


def filters_samples(run: Run, windows: Any) -> None:
    """Leave out a sample."""
    for window in windows:
        for batch in window.micro_batches(run.model):
            fewer = {name: value[1:] for name, value in batch.items()}
            run.accelerator.backward(window.scale(run.loss(fewer), fewer))


def scales_twice(run: Run, windows: Any) -> None:
    """Scale a loss again, to print it."""
    for window in windows:
        for batch in window.micro_batches(run.model):
            loss = run.loss(batch)
            run.accelerator.backward(window.scale(loss, batch))
            window.scale(loss, batch)


def scales_a_scaled_loss(run: Run, windows: Any) -> None:
    """Scale the result of `scale`."""
    for window in windows:
        for batch in window.micro_batches(run.model):
            window.scale(window.scale(run.loss(batch), batch), batch)


def masks_labels(run: Run, windows: Any) -> None:
    """Change labels within the loop, so that the loss has other items than the loader's micro-batch."""
    for window in windows:
        for batch in window.micro_batches(run.model):
            labels = batch.pop("labels").clone()
            labels[:, ::2] = -100
            run.accelerator.backward(window.scale(run.loss({**batch, "labels": labels}), batch))


@pytest.mark.parametrize(
    ("loop", "code"),
    [
        (forgets_scale, "not_scaled"),
        (accumulates, "accumulate_inside"),
        (leaves_early, "incomplete_window"),
        (updates_early, "updated_within_window"),
        (clears_first, "cleared_gradients"),
        (clears_always, "cleared_gradients"),
        (never_clears, "leftover_gradients"),
        (never_clears_after_call, "leftover_gradients"),
        (scales_outside, "scale_outside"),
        (filters_samples, "other_micro_batch"),
        (scales_twice, "scaled_twice"),
        (scales_a_scaled_loss, "scaled_twice"),
        (masks_labels, "unknown_items"),
    ],
)
def test_wrong_loops(loop: Loop, code: str) -> None:
    """A loop whose gradient would be wrong is refused by code, at the latest in the second window."""
    run = Run(HEADS["BERT, tokens"])
    with raises(UserError, code):
        loop(run, run.windows())
    assert len(run.steps) <= 1
    assert run.accelerator.sync_gradients
    assert run.accelerator.gradient_accumulation_steps == 4


@pytest.mark.parametrize("device_placement", [True, False])
def test_freedoms_of_a_loop(device_placement: bool) -> None:
    """A loop may skip windows, end after a step, and change its copy of a micro-batch, also if it moves it itself."""
    run = Run(HEADS["BERT, tokens"], device_placement=device_placement)
    for number, window in enumerate(run.windows()):
        if number == 0:
            continue
        for batch in window.micro_batches(run.model):
            loss = run.loss(batch)
            batch.clear()
            run.accelerator.backward(window.scale(loss, batch))
            run.step()
            if run.accelerator.sync_gradients:
                break
        run.ids.append(window.ids)
        run.losses.append(float(window.loss()))
    assert len(run.windows(start=2)) == 1
    for found, (expected, _) in zip(run.steps, run.references(), strict=True):
        assert relative_error(found, expected) < BOUND


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"distributed_type": "DEEPSPEED"}, "deepspeed"),
        ({"distributed_type": "MEGATRON_LM"}, "megatron"),
        ({"distributed_type": "XLA"}, "xla"),
        ({"distributed_type": "FSDP"}, "fsdp1"),
        ({"parallelism_config": SimpleNamespace(non_data_parallel_size=2)}, "parallelism"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_accelerators(change: dict[str, Any], code: str) -> None:
    """Libraries that run the step themselves, and options without tests, are refused by code."""
    run = Run(HEADS["BERT, classes"])
    if "distributed_type" in change:
        change = {"distributed_type": accelerate.DistributedType(change["distributed_type"])}
    vars(run.accelerator.state).update(fsdp_plugin=SimpleNamespace(fsdp_version=1), **change)
    with raises(UserError, code):
        run.windows()


def test_other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions of Accelerate without tests are refused."""
    run = Run(HEADS["BERT, classes"])
    monkeypatch.setattr(accelerate, "__version__", "1.13.0")
    with raises(UserError, "unsupported_version"):
        run.windows()


def test_refused_loaders() -> None:
    """Loaders that skip batches, are read by one rank, or have no numbered samples or no step are refused by code."""
    run = Run(HEADS["BERT, classes"], dataloader_config=accelerate.DataLoaderConfiguration(dispatch_batches=True))
    with raises(UserError, "dispatch_batches"):
        run.windows()
    forget_accelerator()
    for prepare_loader in (False, True):
        run = Run(HEADS["BERT, classes"], prepare_loader=prepare_loader)
        run.loader = accelerate.skip_first_batches(run.loader, 2)
        with raises(UserError, "skipped_batches"):
            run.windows()
        forget_accelerator()
    run = Run(HEADS["BERT, classes"])
    with raises(UserError, "unsupported_trainer"):
        ab.windows(run.loader, run.accelerator, effective_batch_size=4)
    with raises(UserError, "unsupported_trainer"):
        ab.exact(run.accelerator)
    with raises(UserError, "start_beyond_epoch"):
        run.windows(start=4)
    for loader in (DataLoader(Stream()), run.accelerator.prepare(DataLoader(Stream()))):
        run.loader = loader
        with raises(DataError, "iterable_data"):  # also if Accelerate would read it on one rank
            run.windows()
    run.loader = DataLoader(range(4), batch_size=2, drop_last=True)  # type: ignore[arg-type]
    with raises(DataError, "no_step"):
        run.windows()


class Stream(IterableDataset[int]):
    """Samples without numbers."""

    def __iter__(self) -> Iterator[int]:
        """Yield samples."""
        return iter(range(3))


def test_epochs() -> None:
    """Epochs differ in their order, and a repeated epoch causes a warning."""
    run = Run(HEADS["BERT, classes"])
    first, second = ([window.ids for window in run.windows(epoch=epoch)] for epoch in (0, 1))
    with warns("same_epoch"):
        again = [window.ids for window in run.windows()]
    assert first == again
    assert first != second


class RunWithDropout(Run):
    """A run that updates a model with dropout."""

    def __init__(self) -> None:
        dropout = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.1}
        config = hf.BertConfig(**{**BERT, **dropout}, num_labels=5)
        super().__init__(Head(lambda: hf.BertForTokenClassification(config), HEADS["BERT, tokens"].sample), rate=0.1)


@pytest.mark.parametrize("loop", LOOPS)
def test_resume(loop: str, tmp_path: Path) -> None:
    """A run that resumes in the middle of an epoch has the weights of an uninterrupted run, bit for bit."""
    through, first = RunWithDropout(), RunWithDropout()
    for epoch in range(2):
        torch.manual_seed(epoch)
        LOOPS[loop](through, through.windows(epoch=epoch))
    torch.manual_seed(0)
    LOOPS[loop](first, first.windows(epoch=0))
    torch.manual_seed(1)
    LOOPS[loop](first, itertools.islice(first.windows(epoch=1), 1))
    first.accelerator.save_state(str(tmp_path))
    forget_accelerator()

    resumed = RunWithDropout()
    resumed.accelerator.load_state(str(tmp_path))
    LOOPS[loop](resumed, resumed.windows(epoch=1, start=1))
    assert resumed.scheduler.scheduler.last_epoch == through.scheduler.scheduler.last_epoch == 6
    for found, expected in zip(resumed.net.parameters(), through.net.parameters(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("loop", LOOPS)
def test_mixed_precision(loop: str) -> None:
    """With bf16, gradients differ from the effective batch in float64 by the rounding of bf16 only."""
    run = Run(HEADS["BERT, tokens"], mixed_precision="bf16", dtype=torch.float32)
    LOOPS[loop](run, run.windows())
    for found, (expected, _) in zip(run.steps, run.references(), strict=True):
        assert BOUND < relative_error(found, expected) < 0.05


def unusual_models_on_a_rank() -> None:
    """Check DDP that searches unused parameters, whose outputs pass through a node of DDP, and compiled DDP."""
    for loop in LOOPS.values():
        handlers = [accelerate.DistributedDataParallelKwargs(find_unused_parameters=True)]
        run = Run(HEADS["BERT, tokens"], kwargs_handlers=handlers)
        loop(run, run.windows())
        check(run)
        forget_accelerator()
    run = Run(HEADS["BERT, tokens"])
    run.model = torch.compile(run.model, backend="eager")
    call(run, run.windows())
    check(run)
    with raises(UserError, "unprepared_model"):
        next(iter(run.windows(epoch=1))).backward(run.loss, run.net)


@pytest.mark.slow
@pytest.mark.ranks
def test_unusual_models(two_ranks: RankPool) -> None:
    """DDP is exact if it searches unused parameters or is compiled; a model without DDP is refused."""
    two_ranks.run(on_ranks, unusual_models_on_a_rank)


def fsdp_on_a_rank(loop: str, by: str) -> None:
    """Check an epoch with FSDP2, applied by torch's function or by Accelerate."""
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=False, auto_wrap_policy="transformer_based_wrap"
    )
    accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin if by == "Accelerate" else None)
    if by == "Accelerate":  # which uses DDP instead of FSDP on CPUs, without a warning
        kind = accelerate.DistributedType.FSDP
        vars(accelerate.PartialState()).update(distributed_type=kind)
        vars(accelerator.state).update(distributed_type=kind, fsdp_plugin=plugin)
    run = Run(HEADS["Llama"])
    assert accelerator.is_fsdp2 is (by == "Accelerate")
    if by == "torch":
        torch.manual_seed(1)
        run.model = run.net = fully_shard(run.head.model().double())
        sgd = torch.optim.SGD(run.net.parameters(), lr=0.0)
        sgd.register_step_pre_hook(lambda *_: run.steps.append(gradients(run.net)))
        run.optimizer = accelerator.prepare(sgd)
    assert all(isinstance(parameter, DTensor) for parameter in run.net.parameters())
    LOOPS[loop](run, run.windows())
    check(run)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("by", ["torch", "Accelerate"])
@pytest.mark.parametrize("loop", LOOPS)
def test_fsdp(loop: str, by: str, two_ranks: RankPool) -> None:
    """The steps of a model that FSDP2 shards over two ranks have the gradients of their samples in one batch."""
    two_ranks.run(on_ranks, fsdp_on_a_rank, loop, by)


def saved_on_a_rank(folder: Path) -> None:
    """Save after the first window."""
    run = Run(HEADS["BERT, tokens"], rate=0.1)
    iterate(run, itertools.islice(run.windows(), 1))
    run.accelerator.save_state(str(folder))


@pytest.mark.slow
@pytest.mark.ranks
def test_resume_on_another_number_of_ranks(tmp_path: Path, two_ranks: RankPool) -> None:
    """One rank continues a run of two ranks with the same samples, up to rounding."""
    two_ranks.run(on_ranks, saved_on_a_rank, tmp_path)
    resumed, through = (Run(HEADS["BERT, tokens"], rate=0.1) for _ in range(2))
    resumed.accelerator.load_state(str(tmp_path))
    iterate(resumed, resumed.windows(start=1))
    iterate(through, through.windows())
    assert through.ids[1:] == resumed.ids
    assert relative_error(dict(resumed.net.named_parameters()), dict(through.net.named_parameters())) < BOUND
