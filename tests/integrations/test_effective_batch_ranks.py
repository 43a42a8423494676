"""Effective batches inside a Trainer on two ranks, after a resume, and after an out-of-memory error."""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import anybatch as ab
from anybatch.core.tensors import relative_error
from anybatch.core.torch_internals import TorchDispatchMode
from anybatch.errors import DoesNotFitError, UserError
from anybatch.testing import RankOutcome, run_ranks
from tests.integrations.heads import HEADS, Head, classified, collate, hf
from tests.integrations.trainer_runs import Run, gradients, join_ranks
from tests.raising import raises

accelerate = pytest.importorskip("accelerate", reason="needs the extra anybatch[transformers]")

SIZE = 13
NUM_SAMPLES = 27  # steps of 13, 13 and 1: shares of 7 and 6, 7 and 6, 1 and 0
BOUND = 1e-12


@pytest.fixture(autouse=True)
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models compute their losses in float64: they call `logits.float()`."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # models are saved with a progress bar, and its thread


def values_of(outcomes: list[RankOutcome]) -> list[Any]:
    """Return the values of all ranks, of which none has failed."""
    assert not any(outcome.error for outcome in outcomes), outcomes
    return [outcome.value for outcome in outcomes]


class Small(nn.Module):
    """A classifier of the first token, which is compiled quickly."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Embedding(64, 3)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> Any:
        """Return the mean loss over samples."""
        return hf.utils.ModelOutput(loss=nn.functional.cross_entropy(self.layer(input_ids[:, 0]), labels))


class Reductions(hf.TrainerCallback):  # type: ignore[misc]
    """Counts the buckets that DDP reduces."""

    def __init__(self) -> None:
        self.buckets: list[int] = []
        self.trainer: Any = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Count in DDP's communication hook."""
        self.trainer.model_wrapped.register_comm_hook(None, self._reduce)

    def _reduce(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        self.buckets.append(bucket.index())
        total = bucket.buffer().div_(dist.get_world_size())
        reduced: torch.futures.Future[torch.Tensor] = dist.all_reduce(total, async_op=True).get_future()
        return reduced.then(lambda done: done.value()[0])


def steps_on_a_rank(names: Sequence[str], folder: Path, budget: int | None = None, **options: Any) -> dict[str, Any]:
    """Train each model; return its largest error, its losses and what they should be, its tokens and reductions."""
    join_ranks()
    found = {}
    for name in names:
        count = Reductions()
        run = Run(
            {**HEADS, "small": Head(Small, classified)}[name],
            folder,
            num_samples=NUM_SAMPLES,
            callbacks=[count],
            include_num_input_tokens_seen="non_padding",
            ddp_backend="gloo",
            **options,
        )
        count.trainer = run.trainer
        limit = None if budget is None else ab.token_budget(budget)
        ab.exact(run.trainer, effective_batch_size=SIZE, micro_batch_size=limit).train()
        windows = run.effective_batches(SIZE)
        error = run.worst_error(windows=windows)
        tokens = run.trainer.state.num_input_tokens_seen
        found[name] = (error, run.losses(), run.losses_of(windows), tokens, len(count.buckets), len(run.steps))
    return found


@pytest.mark.ranks
@pytest.mark.slow
def test_two_ranks_share_each_effective_batch(tmp_path: Path) -> None:
    """Uneven shares have the gradient and the loss of all samples, no sample or token counts twice, one reduction."""
    names = ["GPT-2", "BERT, tokens", "BERT, classes", "ViT", "wav2vec2, sum"]
    lengths = [len(sample["input_ids"]) for sample in Run(HEADS["GPT-2"], tmp_path, num_samples=NUM_SAMPLES).samples]

    for of_rank in values_of(run_ranks(2, steps_on_a_rank, names, tmp_path)):
        for name, (error, losses, expected, tokens, num_reductions, num_steps) in of_rank.items():
            assert error < BOUND, name
            assert "sum" in name or losses == pytest.approx(expected, rel=1e-6)
            assert name != "GPT-2" or tokens == sum(lengths)
            assert num_reductions == num_steps == 3


@pytest.mark.ranks
@pytest.mark.slow
def test_token_budgets(tmp_path: Path) -> None:
    """Ranks that divide a step by its tokens have the gradient of all samples, and reduce once."""
    for of_rank in values_of(run_ranks(2, steps_on_a_rank, ["GPT-2"], tmp_path, 40)):
        error, losses, expected, _, num_reductions, num_steps = of_rank["GPT-2"]
        assert error < BOUND
        assert losses == pytest.approx(expected, rel=1e-6)
        assert num_reductions == num_steps == 3


@pytest.mark.ranks
@pytest.mark.slow
def test_compiled_models(tmp_path: Path) -> None:
    """The gradients of a model that the Trainer compiles around DDP are reduced over ranks, once per step."""
    run = partial(steps_on_a_rank, torch_compile=True, torch_compile_backend="eager")
    for of_rank in values_of(run_ranks(2, run, ["small"], tmp_path, timeout_seconds=300)):
        error, _, _, _, num_reductions, num_steps = of_rank["small"]
        assert error < BOUND
        assert num_reductions == num_steps == 3


class Trained(NamedTuple):
    """The samples of a run's steps, and its last weights."""

    steps: list[tuple[int, ...]]
    weights: torch.Tensor


def train_nine_steps(folder: Path, checkpoint: Path | None) -> Trained:
    """Train three epochs and save after step 5, in the middle of the second; or resume there."""
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 5, "learning_rate": 0.1, "num_train_epochs": 3}
    if dist.is_initialized():
        join_ranks()
        options["ddp_backend"] = "gloo"
    run = Run(HEADS["Llama"], folder, num_samples=NUM_SAMPLES, **options)
    trainer = ab.exact(run.trainer, effective_batch_size=SIZE)
    steps, training_step = [], trainer.training_step

    def noting(model: nn.Module, inputs: Any, num_items: Any) -> torch.Tensor:
        steps.append(inputs.key.sample_ids)
        return training_step(model, inputs, num_items)  # type: ignore[no-any-return]

    trainer.training_step = noting
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    assert trainer.state.global_step == 9
    return Trained(steps, run.weights())


@pytest.mark.ranks
@pytest.mark.slow
def test_a_run_resumes_in_an_epoch_on_any_number_of_ranks(tmp_path: Path) -> None:
    """A resumed run has the remaining samples, and on as many ranks the same weights bit for bit."""
    checkpoint = tmp_path / "two" / "checkpoint-5"
    whole = values_of(run_ranks(2, train_nine_steps, tmp_path / "two", None))[0]
    again = values_of(run_ranks(2, train_nine_steps, tmp_path / "again", checkpoint))[0]
    alone = train_nine_steps(tmp_path / "alone", checkpoint)
    whole_alone = train_nine_steps(tmp_path / "one", None)
    grown = values_of(run_ranks(2, train_nine_steps, tmp_path / "grown", tmp_path / "one" / "checkpoint-5"))[0]

    assert len(whole.steps) == 9
    assert again.steps == alone.steps == grown.steps == whole.steps[5:]
    assert torch.equal(again.weights, whole.weights)
    assert whole_alone.steps == whole.steps
    for other in (alone, whole_alone, grown):
        assert float((other.weights - whole.weights).norm() / whole.weights.norm()) < BOUND


class Noisy(nn.Module):
    """A classifier with dropout, and a buffer that each forward changes."""

    average: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Embedding(64, 8), nn.Linear(8, 3)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> Any:
        """Return the mean loss over samples."""
        hidden = nn.functional.dropout(self.layer(input_ids).mean(1), 0.5, self.training)
        if self.training:
            self.average.mul_(0.9).add_(hidden.detach().mean(0))
        return hf.utils.ModelOutput(loss=nn.functional.cross_entropy(self.head(hidden + self.average), labels))


class Gathering(hf.Trainer):  # type: ignore[misc]
    """A trainer that gathers and logs metrics in each micro-batch, as TRL's trainers do."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._metrics: dict[str, Any] = {"train": defaultdict(list)}
        self._total_rows = 0

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss; count the rows of all ranks."""
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        rows = self.accelerator.gather(inputs["labels"])
        self._total_rows += len(rows)
        self._metrics["train"]["rows"].append(self.accelerator.gather_for_metrics(inputs["labels"].sum()).sum().item())
        self.log({"rows": self._total_rows})
        return loss


class Fault(NamedTuple):
    """An out-of-memory error in a micro-batch of the second step; with `place` "smaller" only its consequence."""

    place: str
    micro_batch: int
    rank: int = 0


def plant(run: Run, fault: Fault) -> None:
    """Let the model run out of memory once."""
    trainer, num_calls = run.trainer, 0
    parameter = next(run.model.parameters())  # the embedding, whose gradient is the last one of a backward

    def fail(*_: Any) -> None:
        for handle in handles:
            handle.remove()
        message = "planted"
        raise torch.OutOfMemoryError(message)

    def count(*_: Any) -> None:
        nonlocal num_calls
        num_calls += run.model.training and torch.is_grad_enabled() and trainer.state.global_step == 1
        if num_calls == fault.micro_batch and trainer.args.process_index == fault.rank:
            if fault.place == "forward":
                fail()
            handles.append(parameter.register_hook(fail))

    handles = [run.model.register_forward_hook(count)]


class Smaller(hf.TrainerCallback):  # type: ignore[misc]
    """Halves the micro-batch size before the second step."""

    def on_step_begin(self, _: Any, state: Any, __: Any, **options: Any) -> None:
        """Set the size of the loader's shares."""
        if state.global_step == 1:
            options["train_dataloader"].dataset.micro_batch_size = 2


class Survived(NamedTuple):
    """The end of a run that ran out of memory."""

    weights: torch.Tensor
    losses: list[float]
    metrics: dict[str, list[float]]
    logged: list[int]
    num_steps: int


def survive(fault: Fault, folder: Path, num_workers: int) -> Survived:
    """Train with a fault."""
    options: dict[str, Any] = {"learning_rate": 0.1, "dataloader_num_workers": num_workers}
    if dist.is_initialized():
        join_ranks()
        options["ddp_backend"] = "gloo"
    callbacks = [Smaller()] if fault.place == "smaller" else []
    run = Run(
        Head(Noisy, classified), folder, Gathering, num_samples=NUM_SAMPLES, callbacks=callbacks, seed=1, **options
    )
    if not callbacks:
        plant(run, fault)
    trainer = ab.exact(run.trainer, effective_batch_size=SIZE)
    trainer.train()
    assert trainer.callback_handler.train_dataloader.dataset.micro_batch_size == 2
    logged = [entry["rows"] for entry in trainer.state.log_history if "rows" in entry]
    metrics = dict(trainer._metrics["train"])  # noqa: SLF001 (the name of TRL's metrics)
    return Survived(run.weights(), run.losses(), metrics, logged, trainer.state.global_step)


def survive_all(faults: Sequence[Fault], folder: Path) -> list[Survived]:
    """Train once with each fault."""
    return [survive(fault, folder, 0) for fault in faults]


def assert_equal(found: Survived, expected: Survived) -> None:
    """Compare two runs bit for bit."""
    assert torch.equal(found.weights, expected.weights)
    assert found[1:] == expected[1:]


@pytest.mark.parametrize(
    "fault", [Fault("forward", 1), Fault("forward", 3), Fault("backward", 2), Fault("backward", 5)], ids=str
)
def test_a_step_is_repeated_after_out_of_memory(
    fault: Fault, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run equals, bit for bit, one that changes to the smaller micro-batches at that step; it prints both sizes."""
    found = survive(fault, tmp_path, 0)
    printed = capsys.readouterr().out
    expected = survive(Fault("smaller", 0), tmp_path, 0)

    assert_equal(found, expected)
    assert found.logged[-1] == NUM_SAMPLES
    assert "in step 1: repeated with micro-batches of at most 2 samples instead of 3" in printed
    assert "out of memory" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_step_is_repeated_with_batches_of_workers(tmp_path: Path) -> None:
    """Workers may have loaded batches of the larger size already."""
    assert_equal(survive(Fault("backward", 2), tmp_path, 2), survive(Fault("smaller", 0), tmp_path, 0))


@pytest.mark.ranks
@pytest.mark.slow
def test_out_of_memory_on_one_of_two_ranks(tmp_path: Path) -> None:
    """All ranks repeat the step if one rank fails, also while another rank waits for its metrics."""
    faults = [
        Fault("smaller", 0),
        Fault("forward", 1, rank=1),
        Fault("forward", 2),
        Fault("backward", 2, rank=1),
        Fault("backward", 3),
        Fault("backward", 3, rank=1),
    ]
    for expected, *others in values_of(run_ranks(2, survive_all, faults, tmp_path)):
        assert expected.logged[-1] == NUM_SAMPLES  # without the samples of fillers
        for found in others:
            assert_equal(found, expected)


def test_a_sample_that_does_not_fit_ends_the_run(tmp_path: Path) -> None:
    """The run ends if a single sample does not fit, before an update."""

    def fail(*_: Any) -> None:
        if torch.is_grad_enabled():
            message = "planted"
            raise torch.OutOfMemoryError(message)

    run = Run(HEADS["BERT, classes"], tmp_path)
    run.model.register_forward_hook(fail)

    with pytest.raises(DoesNotFitError):
        ab.exact(run.trainer, effective_batch_size=SIZE).train()
    assert not run.steps


class ReduceScatters(TorchDispatchMode):
    """Counts reduce-scatters."""

    number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the call."""
        del types
        self.number += "reduce_scatter" in str(function)
        return function(*args, **(kwargs or {}))


class ShardedByAccelerate(hf.Trainer):  # type: ignore[misc]
    """A Trainer with the option `fsdp`; on CPUs, Accelerate would use DDP instead, without a warning."""

    version = 2

    def __init__(self, *args: Any, optimizers: Any, **options: Any) -> None:
        del optimizers  # the Trainer would refuse them
        super().__init__(*args, **options)

    def create_accelerator_and_postprocess(self) -> None:
        """Set the state that Accelerate sets on GPUs."""
        super().create_accelerator_and_postprocess()
        plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=self.version, cpu_ram_efficient_loading=False, auto_wrap_policy="transformer_based_wrap"
        )
        kind = accelerate.DistributedType.FSDP
        vars(accelerate.PartialState()).update(distributed_type=kind)
        vars(self.accelerator.state).update(distributed_type=kind, fsdp_plugin=plugin)
        self.is_fsdp_enabled = True

    def create_optimizer(self, model: Any = None) -> Any:
        """Return an optimizer for the parameters, which Accelerate replaces."""
        del model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        return self.optimizer


class Fsdp1(ShardedByAccelerate):
    """A Trainer with the first version of FSDP."""

    version = 1


def sharded_steps_on_a_rank(folder: Path, by: str) -> list[tuple[float, int]]:
    """Train a model that is sharded; return the error and the number of reduce-scatters of each step."""
    join_ranks()
    torch.manual_seed(1)
    head, initial, steps = HEADS["Llama"], HEADS["Llama"].model().double(), []
    if dist.get_rank() == 0:
        initial.save_pretrained(folder / "model")  # type: ignore[operator]
    dist.barrier()

    def load() -> nn.Module:
        sharded: nn.Module = hf.LlamaForCausalLM.from_pretrained(
            folder / "model", distributed_config=hf.DistributedConfig(fsdp_size=2), dtype=torch.float64
        )
        return sharded

    options: dict[str, Any] = {"num_samples": NUM_SAMPLES, "ddp_backend": "gloo"}
    if by == "Accelerate":
        with raises(UserError, "fsdp"):
            ab.exact(Run(head, folder, Fsdp1, **options).trainer, effective_batch_size=SIZE)
        run = Run(head, folder, ShardedByAccelerate, **options)
    else:
        run = Run(Head(load, head.sample), folder, **options)
    trainer = run.trainer
    with raises(UserError, "fsdp"):
        ab.exact(trainer)
    ab.exact(trainer, effective_batch_size=SIZE)
    training_step = trainer.training_step

    def noting(model: nn.Module, share: Any, num_items: Any) -> torch.Tensor:
        with ReduceScatters() as count:  # type: ignore[no-untyped-call]  # torch's
            loss: torch.Tensor = training_step(model, share, num_items)
        steps.append(({name: gathered(parameter) for name, parameter in run.model.named_parameters()}, count.number))
        return loss

    trainer.training_step = noting
    trainer.train()
    found = []
    for (sharded, num_reductions), window in zip(steps, run.effective_batches(SIZE), strict=True):
        initial.zero_grad()
        initial(**collate(window)).loss.backward()
        found.append((relative_error(sharded, gradients(initial)), num_reductions))
    return found


def gathered(parameter: nn.Parameter) -> torch.Tensor:
    """Return the gradient of all ranks' parts of a parameter."""
    assert isinstance(parameter.grad, DTensor)
    return parameter.grad.full_tensor()


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("by", ["transformers", "Accelerate"])
def test_models_sharded_by_fsdp2(by: str, tmp_path: Path) -> None:
    """With FSDP2 the steps are exact, and each reduces once, regardless of its number of micro-batches."""
    if by == "transformers" and not hasattr(hf, "DistributedConfig"):
        pytest.skip("this transformers does not shard models")
    for of_rank in values_of(run_ranks(2, sharded_steps_on_a_rank, tmp_path, by)):
        errors, reductions = zip(*of_rank, strict=True)
        assert max(errors) < BOUND
        assert len(set(reductions)) == 1, reductions  # the last step has a single micro-batch
        assert reductions[0] > 0
