"""Inputs that raise an error, with its class and the value that its message names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import anybatch as ab
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


@dataclass(frozen=True, slots=True)
class Refusal:
    """An input that raises an error: its exact class, the value that its message names, and the input."""

    error: type[AnyBatchError]
    says: str
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
    "size 0": Refusal(BatchSizeError, "effective_batch_size=0", lambda: engine(effective_batch_size=0)),
    "size -1": Refusal(BatchSizeError, "micro_batch_size=-1", lambda: engine(micro_batch_size=-1)),
    "a fraction": Refusal(BatchSizeError, "accumulation_steps=2.5", lambda: engine(accumulation_steps=2.5)),
    "sizes that contradict": Refusal(
        BatchSizeError,
        "effective_batch_size=256",
        lambda: engine(effective_batch_size=256, accumulation_steps=8, micro_batch_size=16),
    ),
    "more steps than samples": Refusal(
        BatchSizeError, "accumulation_steps=9", lambda: engine(effective_batch_size=8, accumulation_steps=9)
    ),
    "a larger batch than named": Refusal(
        BatchSizeError, "5 samples", lambda: step(accumulation_steps=2, micro_batch_size=2)
    ),
    "batches of 0": Refusal(
        BatchSizeError, "effective_batch_size=0", lambda: ab.batches(range(5), effective_batch_size=0)
    ),
    "batches of -1": Refusal(
        BatchSizeError, "effective_batch_size=-1", lambda: ab.batches(range(5), effective_batch_size=-1)
    ),
    # Data
    "an empty data set": Refusal(DataError, "data set is empty", lambda: ab.batches([], effective_batch_size=4)),
    "an empty batch": Refusal(BatchSizeError, "empty", lambda: step(batch={"x": torch.zeros(0, 5)})),
    "a batch without samples": Refusal(DataError, "dict", lambda: step(batch={"temperature": 1.0})),
    "leaves of different lengths": Refusal(DataError, "batch['x'] has 5 samples", lambda: step(batch=unlike())),
    "nothing to evaluate": Refusal(LossError, "nothing to evaluate", lambda: engine().evaluate([])),
    # Losses
    "a loss that is not a function": Refusal(LossError, "float", lambda: engine(loss=0.5)),
    "a bare scalar loss that is unchecked": Refusal(LossError, "one number", lambda: step(classify, check_loss=False)),
    "a bare scalar loss of one sample": Refusal(LossError, "one number", lambda: step(classify, vectors(1))),
    "a bare scalar loss that is not a mean over samples": Refusal(
        LossError, "one number", lambda: step(classify_weighted)
    ),
    "an undeclared dict": Refusal(
        LossError, "['aux', 'lm']", lambda: step(returns(lambda each: {"lm": each.mean(), "aux": each.mean()}))
    ),
    "other terms than declared": Refusal(
        LossError,
        "['aux', 'lm']",
        lambda: step(
            ab.sum_of(returns(lambda each: {"ml": each.mean(), "aux": each.mean()}), lm=ab.samples(), aux=ab.samples())
        ),
    ),
    "no dict where terms are declared": Refusal(
        LossError, "['lm']", lambda: step(ab.sum_of(classify, lm=ab.samples()))
    ),
    "no terms": Refusal(LossError, "at least one term", lambda: ab.sum_of(classify)),
    "a term that is not a loss": Refusal(LossError, "lm=0.5", lambda: ab.sum_of(classify, lm=0.5)),  # type: ignore[arg-type]
    "a loss that is a number": Refusal(LossError, "float", lambda: step(ab.mean_over_samples(returns(0.5)))),
    "no loss": Refusal(LossError, "NoneType", lambda: step(ab.mean_over_samples(returns(None)))),
    "more losses than samples": Refusal(
        LossError, "(5, 2)", lambda: step(ab.mean_over_samples(returns(lambda each: torch.stack([each, each], 1))))
    ),
    "a mean with an axis": Refusal(
        LossError, "(1,)", lambda: step(ab.mean_over_samples(returns(lambda each: each.mean().reshape(1))))
    ),
    "fewer losses than targets": Refusal(
        LossError,
        "(5,)",
        lambda: step(
            ab.mean_over_tokens(returns(lambda each: each)), {**vectors(5), "labels": torch.ones(5, 4).long()}
        ),
    ),
    "another count than declared": Refusal(
        LossError, "count=4", lambda: step(ab.mean_over_samples(returns(lambda each: ab.LossSum(each.sum(), 4))))
    ),
    "a count below 0": Refusal(LossError, "'loss' is -1", lambda: step(ab.mean_over(classify, lambda _: -1))),
    "all targets masked": Refusal(
        LossError,
        "has a count of 0 over all 29 samples",
        lambda: step(ab.mean_over_tokens(classify), sentences_masked(0, 29)),
    ),
    "labels under another name": Refusal(
        LossError, "labels='targets'", lambda: step(ab.mean_over_tokens(classify, labels="targets"), sentences())
    ),
    "labels that are not a tensor": Refusal(
        LossError, "labels='labels'", lambda: step(ab.mean_over_tokens(classify), {"labels": ["a", "b"]})
    ),
    "a loss of NaN": Refusal(
        NonFiniteError, "step 0", lambda: step(ab.mean_over_samples(returns(lambda each: each.mean() * float("nan"))))
    ),
    "an infinite loss": Refusal(
        NonFiniteError, "step 0", lambda: step(returns(lambda each: ab.LossSum(each.sum() * float("inf"), 5)))
    ),
    "no items counted": Refusal(
        NonFiniteError, "step 0", lambda: step(returns(lambda each: ab.LossSum(each.sum() * 0, 0)))
    ),
    "a gradient of NaN": Refusal(NonFiniteError, "gradient", infinite_gradient),
    # Models and optimizers
    "a model that is not a module": Refusal(ParameterError, "'model' is list", lambda: engine([perceptron()], sgd)),
    "a lazy layer": Refusal(
        ParameterError, "module '1' is lazy", lambda: engine(nn.Sequential(nn.Linear(5, 4), nn.LazyLinear(4)), sgd)
    ),
    "nothing to train": Refusal(ParameterError, "no trainable parameters", lambda: engine(stuck(), sgd)),
    "a model without data": Refusal(ParameterError, "'0.weight'", lambda: engine(perceptron().to("meta"), sgd)),
    "a wrapped model": Refusal(ParameterError, "DataParallel", lambda: engine(nn.DataParallel(perceptron()), sgd)),
    "a model with a wrapped part": Refusal(
        ParameterError, "module '0'", lambda: engine(nn.Sequential(nn.DataParallel(perceptron())), sgd)
    ),
    "parameters in no optimizer": Refusal(
        ParameterError,
        "4 of 6 trainable parameters",
        lambda: engine(model := perceptron(), torch.optim.SGD(model.get_submodule("0").parameters(), lr=0.1)),
    ),
    "an optimizer of another model": Refusal(
        ParameterError,
        "1 trainable parameters that are in no module of the engine",
        lambda: engine(
            model := perceptron(), torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(3, 2))], lr=0.1)
        ),
    ),
    "an optimizer function that returns none": Refusal(ParameterError, "returned list", lambda: engine(optimizer=list)),
    # Choices
    "an unknown strategy": Refusal(UserError, "'zero9'", lambda: engine(strategy="zero9")),
    "an unknown precision": Refusal(UserError, "'fp8'", lambda: engine(precision="fp8")),
    "an unknown rng": Refusal(UserError, "'sample'", lambda: engine(rng="sample")),
    "an unknown deal": Refusal(UserError, "'even'", lambda: engine(deal="even")),
    "no room below the norm": Refusal(UserError, "clip=0", lambda: engine(clip=0)),
    "a reduction without ranks": Refusal(CompositionError, "all_reduce", lambda: engine(strategy="all_reduce")),
    "whole units of given shares": Refusal(
        CompositionError, "deal='fixed'", lambda: step(deal="fixed", micro_batch_size=2)
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
    "a sum that is not a number": Refusal(
        LossError,
        "one number, the sum",
        lambda: step(returns(lambda each: ab.LossSum(each, len(each))), own_part(), **here()),
    ),
    "separate models": Refusal(CompositionError, "strategy='single'", lambda: engine(**here(strategy="single"))),
    "sizes that contradict on two ranks": Refusal(
        BatchSizeError,
        "2 ranks x accumulation_steps=4 x micro_batch_size=16 = 128",
        lambda: engine(**here(effective_batch_size=256, accumulation_steps=4, micro_batch_size=16)),
    ),
    "an optimizer made too early": Refusal(CompositionError, "'fsdp'", lambda: engine(**here(strategy="fsdp"))),
    "low precision under ddp": Refusal(
        CompositionError, "ddp", lambda: engine(perceptron().bfloat16(), **here(strategy="ddp"))
    ),
    "sparse gradients on ranks": Refusal(
        CompositionError, "sparse gradients", lambda: engine(nn.Sequential(nn.Embedding(5, 4, sparse=True)), **here())
    ),
    "a wrapped model on ranks": Refusal(
        ParameterError, "DistributedDataParallel", lambda: engine(wrapped(), sgd, **here())
    ),
    "the same samples on two ranks": Refusal(DataError, "ranks 0 and 1", lambda: step(**here())),
    "other batches on two ranks": Refusal(
        DataError, "another effective batch", lambda: step(batch=InMemory(own_part()), **here())
    ),
    "another seed on two ranks": Refusal(
        DataError,
        "with seed 0",
        lambda: step(batch=InMemory(vectors(5), seed=ab.World.from_environment().rank), **here()),
    ),
    "no samples on two ranks": Refusal(
        BatchSizeError, "no rank has a sample", lambda: step(batch={"x": torch.zeros(0, 5)}, **here())
    ),
    "all targets masked on two ranks": Refusal(
        LossError,
        "has a count of 0 over all 29 samples",
        lambda: step(ab.mean_over_tokens(classify), InMemory(sentences_masked(0, 29)), **here()),
    ),
    "a loss of NaN on one rank": Refusal(
        NonFiniteError, "step 0", lambda: step(ab.mean_over_samples(one_nan), own_part(), **here())
    ),
    "replicas that differ": Refusal(
        ReplicaError,
        "differ between ranks",
        lambda: engine(one_model_per_rank(), **here(strategy=AllReduce(initial="verify"))),
    ),
    "models that differ": Refusal(
        RanksDifferError,
        "different model",
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
