"""Inputs that raise an error, with its class and words of its message.

python -m tests.engine.refusals        prints all messages
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import anybatch as ab
from anybatch.engine.update.clipping import ClipByValue
from anybatch.errors import (
    AnyBatchError,
    BatchSizeError,
    CompositionError,
    DataError,
    LossError,
    NonFiniteError,
    ParameterError,
    RanksDifferError,
    ReplicaError,
    UserError,
)
from anybatch.parallel.all_reduce import AllReduce
from anybatch.testing import RankOutcome, RankPool, run_ranks
from tests.engine.cases import (
    Batch,
    InMemory,
    classify,
    classify_each,
    classify_weighted,
    perceptron,
    sentences,
    sentences_masked,
    vectors,
)
from tests.engine.failures import FAILURES, train


@dataclass(frozen=True, slots=True)
class Refusal:
    """An input that raises an error.

    Attributes:
        error: the class of the error, exactly.
        words: required words of its message, the two values and the fix among them.
        provoke: passes the input.
    """

    error: type[AnyBatchError]
    words: tuple[str, ...]
    provoke: Callable[[], object]


def engine(
    model: Any = None, optimizer: Any = None, loss: Any = None, *, world: ab.World | None = None, **options: Any
) -> ab.Engine:
    """Build an engine with one wrong argument."""
    model = perceptron() if model is None else model
    if optimizer is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = ab.mean_over_samples(classify) if loss is None else loss
    return ab.Engine(model, optimizer, loss, world=world or ab.World(), **options)


def step(loss: Any = None, batch: Any = None, **options: Any) -> object:
    """Make a step that fails."""
    return engine(loss=loss, **options).step(vectors(5) if batch is None else batch)


def returns(value: Any) -> Callable[[nn.Module, Batch], Any]:
    """Return a loss function that returns this, or the result of calling it with each sample's loss."""
    return lambda model, batch: value(classify_each(model, batch)) if callable(value) else value


def stuck() -> nn.Module:
    """Return a model without trainable parameters."""
    return perceptron().requires_grad_(requires_grad=False)


def unlike() -> Mapping[str, Any]:
    """Return a batch whose leaves disagree about its length."""
    return {"x": torch.zeros(5, 5).double(), "y": torch.zeros(4, dtype=torch.long)}


def infinite_gradient() -> object:
    """Make a step whose loss is finite and whose gradient is not."""
    return step(ab.mean_over_samples(lambda model, batch: (model(batch["x"]) * 0).abs().sqrt().mean()))


ON_ONE_RANK: Mapping[str, Refusal] = {
    # Sizes
    "size 0": Refusal(BatchSizeError, ("effective_batch_size=0", "at least 1"), lambda: engine(effective_batch_size=0)),
    "size -1": Refusal(BatchSizeError, ("micro_batch_size=-1", "at least 1"), lambda: engine(micro_batch_size=-1)),
    "a fraction": Refusal(
        BatchSizeError, ("accumulation_steps=2.5", "whole number", "float"), lambda: engine(accumulation_steps=2.5)
    ),
    "sizes that contradict": Refusal(
        BatchSizeError,
        ("effective_batch_size=256", "1 rank x accumulation_steps=8 x micro_batch_size=16 = 128", "would be 16"),
        lambda: engine(effective_batch_size=256, accumulation_steps=8, micro_batch_size=16),
    ),
    "more steps than samples": Refusal(
        BatchSizeError,
        ("accumulation_steps=9", "8 samples", "at most 8"),
        lambda: engine(effective_batch_size=8, accumulation_steps=9),
    ),
    "a larger batch than named": Refusal(
        BatchSizeError,
        ("5 samples", "effective_batch_size=4 = 1 rank x 2 accumulation steps x 2"),
        lambda: step(accumulation_steps=2, micro_batch_size=2),
    ),
    "batches of 0": Refusal(
        BatchSizeError,
        ("effective_batch_size=0", "at least 1"),
        lambda: ab.batches(range(5), effective_batch_size=0),
    ),
    "batches of -1": Refusal(
        BatchSizeError,
        ("effective_batch_size=-1", "at least 1"),
        lambda: ab.batches(range(5), effective_batch_size=-1),
    ),
    # Data
    "an empty data set": Refusal(
        DataError,
        ("data set is empty", "len(dataset)=0", "at least 1 sample"),
        lambda: ab.batches([], effective_batch_size=4),
    ),
    "an empty batch": Refusal(
        BatchSizeError, ("empty", "no rank has a sample"), lambda: step(batch={"x": torch.zeros(0, 5)})
    ),
    "a batch without samples": Refusal(
        DataError, ("dict", "no tensor with a first axis"), lambda: step(batch={"temperature": 1.0})
    ),
    "leaves of different lengths": Refusal(
        DataError, ("batch['x'] has 5 samples", "batch['y'] has 4"), lambda: step(batch=unlike())
    ),
    # Losses
    "a loss that is no function": Refusal(LossError, ("float", "0.5"), lambda: engine(loss=0.5)),
    "a bare scalar loss that is unchecked": Refusal(
        LossError,
        ("one number", "ab.mean_over_samples(loss)", "ab.LossSum"),
        lambda: step(classify, check_loss=False),
    ),
    "a bare scalar loss of one sample": Refusal(
        LossError, ("one number", "ab.mean_over_samples(loss)"), lambda: step(classify, vectors(1))
    ),
    "a bare scalar loss that is no mean over samples": Refusal(
        LossError,
        ("one number", "taken as a mean over samples", "rounding: below", "ab.mean_over(loss, count"),
        lambda: step(classify_weighted),
    ),
    "an undeclared dict": Refusal(
        LossError,
        ("['aux', 'lm']", "not declared with terms", "ab.sum_of"),
        lambda: step(returns(lambda each: {"lm": each.mean(), "aux": each.mean()})),
    ),
    "other terms than declared": Refusal(
        LossError,
        ("['aux', 'lm']", "['aux', 'ml']", "one value for each"),
        lambda: step(
            ab.sum_of(returns(lambda each: {"ml": each.mean(), "aux": each.mean()}), lm=ab.samples(), aux=ab.samples())
        ),
    ),
    "no dict where terms are declared": Refusal(
        LossError, ("['lm']", "Tensor"), lambda: step(ab.sum_of(classify, lm=ab.samples()))
    ),
    "no terms": Refusal(LossError, ("at least one term", "ab.tokens()"), lambda: ab.sum_of(classify)),
    "a term that is none": Refusal(LossError, ("lm=0.5", "ab.samples"), lambda: ab.sum_of(classify, lm=0.5)),  # type: ignore[arg-type]
    "a loss that is a number": Refusal(
        LossError, ("float", "must return a tensor"), lambda: step(ab.mean_over_samples(returns(0.5)))
    ),
    "no loss": Refusal(LossError, ("NoneType",), lambda: step(ab.mean_over_samples(returns(None)))),
    "more losses than samples": Refusal(
        LossError,
        ("(5, 2)", "mean over samples", "each of the 5 samples"),
        lambda: step(ab.mean_over_samples(returns(lambda each: torch.stack([each, each], 1)))),
    ),
    "a mean with an axis": Refusal(
        LossError,
        ("(1,)", "one number, no axis"),
        lambda: step(ab.mean_over_samples(returns(lambda each: each.mean().reshape(1)))),
    ),
    "fewer losses than targets": Refusal(
        LossError,
        ("(5,)", "mean over tokens", "has 15"),
        lambda: step(
            ab.mean_over_tokens(returns(lambda each: each)), {**vectors(5), "labels": torch.ones(5, 4).long()}
        ),
    ),
    "another count than declared": Refusal(
        LossError,
        ("count=4", "counts 5"),
        lambda: step(ab.mean_over_samples(returns(lambda each: ab.LossSum(each.sum(), 4)))),
    ),
    "a count below 0": Refusal(
        LossError, ("'loss' is -1", "not negative"), lambda: step(ab.mean_over(classify, lambda _: -1))
    ),
    "all targets masked": Refusal(
        LossError,
        ("counts 0 over all 29 samples", "all targets masked"),
        lambda: step(ab.mean_over_tokens(classify), sentences_masked(0, 29)),
    ),
    "labels under another name": Refusal(
        LossError,
        ("labels='targets'", "['labels', 'value', 'words']"),
        lambda: step(ab.mean_over_tokens(classify, labels="targets"), sentences()),
    ),
    "labels that are no tensor": Refusal(
        LossError,
        ("labels='labels'", "list"),
        lambda: step(ab.mean_over_tokens(classify), {"labels": ["a", "b"]}),
    ),
    "a loss of NaN": Refusal(
        NonFiniteError,
        ("step 0", "not finite", "are unchanged"),
        lambda: step(ab.mean_over_samples(returns(lambda each: each.mean() * float("nan")))),
    ),
    "an infinite loss": Refusal(
        NonFiniteError, ("step 0",), lambda: step(returns(lambda each: ab.LossSum(each.sum() * float("inf"), 5)))
    ),
    "nothing counted after all": Refusal(
        NonFiniteError, ("step 0",), lambda: step(returns(lambda each: ab.LossSum(each.sum() * 0, 0)))
    ),
    "a gradient of NaN": Refusal(NonFiniteError, ("gradient", "step 0"), infinite_gradient),
    # Models and optimizers
    "a model that is none": Refusal(
        ParameterError, ("'model' is list", "torch.nn.Module"), lambda: engine([perceptron()], sgd)
    ),
    "a lazy layer": Refusal(
        ParameterError,
        ("module '1' is lazy", "Run one forward before"),
        lambda: engine(nn.Sequential(nn.Linear(5, 4), nn.LazyLinear(4)), sgd),
    ),
    "nothing to train": Refusal(ParameterError, ("no trainable parameters", "6 in all"), lambda: engine(stuck(), sgd)),
    "a model without data": Refusal(
        ParameterError, ("'0.weight'", "meta"), lambda: engine(perceptron().to("meta"), sgd)
    ),
    "a wrapped model": Refusal(
        ParameterError, ("DataParallel", ".module"), lambda: engine(nn.DataParallel(perceptron()), sgd)
    ),
    "a model with a wrapped part": Refusal(
        ParameterError,
        ("module '0'", "DataParallel", ".module"),
        lambda: engine(nn.Sequential(nn.DataParallel(perceptron())), sgd),
    ),
    "parameters in no optimizer": Refusal(
        ParameterError,
        ("4 of 6 trainable parameters", "2.weight", "requires_grad_(False)"),
        lambda: engine(model := perceptron(), torch.optim.SGD(model.get_submodule("0").parameters(), lr=0.1)),
    ),
    "an optimizer of another model": Refusal(
        ParameterError,
        ("1 trainable parameters that belong to no given module", "(3, 2)", "dict of modules"),
        lambda: engine(
            model := perceptron(), torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(3, 2))], lr=0.1)
        ),
    ),
    "an optimizer function that makes none": Refusal(
        ParameterError, ("returned list", "AdamW"), lambda: engine(optimizer=list)
    ),
    # Choices
    "an unknown strategy": Refusal(UserError, ("'zero9'", "'all_reduce'"), lambda: engine(strategy="zero9")),
    "an unknown precision": Refusal(UserError, ("'fp8'", "'bf16'"), lambda: engine(precision="fp8")),
    "an unknown rng": Refusal(UserError, ("'sample'", "'micro_batch'"), lambda: engine(rng="sample")),
    "no room below the norm": Refusal(UserError, ("clip=0", "above 0"), lambda: engine(clip=0)),
    "no room below the value": Refusal(UserError, ("max_value=-1", "above 0"), lambda: engine(clip=ClipByValue(-1))),
    "a reduction without ranks": Refusal(
        CompositionError, ("all_reduce", "has not been started", "torchrun"), lambda: engine(strategy="all_reduce")
    ),
    "whole units of given shares": Refusal(
        CompositionError, ("deal='fixed'", "ab.batches"), lambda: step(deal="fixed", micro_batch_size=2)
    ),
}


def sgd(named: Any) -> torch.optim.Optimizer:
    """Build an optimizer over named parameters."""
    return torch.optim.SGD(named, lr=0.1)


def here(**options: Any) -> dict[str, Any]:
    """Return options with the world of this process."""
    return {"world": ab.World.from_environment(), **options}


def own_part() -> Batch:
    """Return a batch that differs from rank to rank."""
    return vectors(5 + ab.World.from_environment().rank)


def one_model_per_rank() -> nn.Module:
    """Return a model with other values on each rank, and a buffer."""
    torch.manual_seed(ab.World.from_environment().rank)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).double()


def wrapped() -> nn.Module:
    """Return a model wrapped in DistributedDataParallel."""
    return DistributedDataParallel(perceptron())


def one_nan(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return a loss that is NaN in the second rank's share."""
    return classify_each(model, batch) * (float("nan") if len(batch["x"]) > 5 else 1.0)


ON_TWO_RANKS: Mapping[str, Refusal] = {
    # On ranks, because a check of annotated shapes, where it runs, raises first.
    "a sum that is no number": Refusal(
        LossError,
        ("one number, the sum",),
        lambda: step(returns(lambda each: ab.LossSum(each, len(each))), own_part(), **here()),
    ),
    "separate models": Refusal(
        CompositionError,
        ("strategy='single'", "several ranks", "2 of them", "'auto'"),
        lambda: engine(**here(strategy="single")),
    ),
    "sizes that contradict on two ranks": Refusal(
        BatchSizeError,
        ("2 ranks x accumulation_steps=4 x micro_batch_size=16 = 128", "would be 8"),
        lambda: engine(**here(effective_batch_size=256, accumulation_steps=4, micro_batch_size=16)),
    ),
    "an optimizer made too early": Refusal(
        CompositionError,
        ("'fsdp'", "new parameters", "optimizer=lambda named: torch.optim.SGD"),
        lambda: engine(**here(strategy="fsdp")),
    ),
    "low precision under ddp": Refusal(
        CompositionError,
        ("ddp", "'0.weight' is torch.bfloat16", "'all_reduce'"),
        lambda: engine(perceptron().bfloat16(), **here(strategy="ddp")),
    ),
    "sparse gradients on ranks": Refusal(
        CompositionError,
        ("sparse gradients", "dense buckets", "sparse=False"),
        lambda: engine(nn.Sequential(nn.Embedding(5, 4, sparse=True)), **here()),
    ),
    "a wrapped model on ranks": Refusal(
        ParameterError, ("DistributedDataParallel", ".module"), lambda: engine(wrapped(), sgd, **here())
    ),
    "the same samples on two ranks": Refusal(
        DataError, ("ranks 0 and 1", "2 times", "DistributedSampler"), lambda: step(**here())
    ),
    "other batches on two ranks": Refusal(
        DataError, ("another effective batch", "seed"), lambda: step(batch=InMemory(own_part()), **here())
    ),
    "another seed on two ranks": Refusal(
        DataError,
        ("with seed 0", "with seed 1"),
        lambda: step(batch=InMemory(vectors(5), seed=ab.World.from_environment().rank), **here()),
    ),
    "no samples on two ranks": Refusal(
        BatchSizeError, ("no rank has a sample",), lambda: step(batch={"x": torch.zeros(0, 5)}, **here())
    ),
    "all targets masked on two ranks": Refusal(
        LossError,
        ("counts 0 over all 29 samples",),
        lambda: step(ab.mean_over_tokens(classify), InMemory(sentences_masked(0, 29)), **here()),
    ),
    "a loss of NaN on one rank": Refusal(
        NonFiniteError, ("step 0",), lambda: step(ab.mean_over_samples(one_nan), own_part(), **here())
    ),
    "replicas that differ": Refusal(
        ReplicaError,
        ("differ between ranks", "'0.weight'", "initial='broadcast'"),
        lambda: engine(one_model_per_rank(), **here(strategy=AllReduce(initial="verify"))),
    ),
    "models that differ": Refusal(
        RanksDifferError,
        ("different model", "rank 0", "rank 1", "same values on every rank"),
        lambda: engine(nn.Linear(5, 3 + ab.World.from_environment().rank), **here()),
    ),
}


def told(name: str, refusals: Mapping[str, Refusal]) -> tuple[str, str]:
    """Pass the wrong input; return the error's class and message."""
    try:
        refusals[name].provoke()
    except AnyBatchError as error:
        return type(error).__name__, str(error)
    return "", "nothing was refused"


def told_on_ranks() -> dict[str, tuple[str, str]]:
    """Run on every rank: pass all inputs that are wrong there."""
    return {name: told(name, ON_TWO_RANKS) for name in ON_TWO_RANKS}


def main() -> None:
    """Print every message."""
    torch.set_num_threads(1)
    for name in ON_ONE_RANK:
        kind, message = told(name, ON_ONE_RANK)
        print(f"{name}\n    {kind}: {message}")  # noqa: T201 (a script)
    with RankPool(2) as pool:
        for name, (kind, message) in pool.run(told_on_ranks)[0].items():
            print(f"{name}\n    {kind}: {message}")  # noqa: T201 (a script)
    for name, failure in FAILURES.items():
        survivor, *_ = run_ranks(failure.world_size, train, failure)
        print(f"a rank that ends ({name}), as the first rank says it\n    {last_line(survivor)}")  # noqa: T201 (a script)


def last_line(outcome: RankOutcome) -> str:
    """Return the error of a rank without its traceback."""
    return (outcome.error or "no error").strip().splitlines()[-1].removeprefix("anybatch.errors.")


if __name__ == "__main__":
    main()
