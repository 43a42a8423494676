"""Evaluation returns the plain metrics, for any cut, number of ranks and module modes."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.core.loss import Loss
from anybatch.errors import LossError, UserError
from anybatch.metrics import OverWholeSet
from tests.engine.cases import (
    AUX_WEIGHT,
    NUM_WORDS,
    STRATEGIES,
    Batch,
    InMemory,
    classify,
    cut,
    language_model,
    predict,
    predict_and_value,
    predict_sum,
    sentences,
    sentences_masked,
    sgd_engine,
    vectors,
)
from tests.faults import sees
from tests.raising import raises
from tests.ranks_fixture import Ranks

WORD_WEIGHTS = torch.linspace(0.1, 3.0, NUM_WORDS, dtype=torch.float64)


def words_and_values(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return metrics of two kinds: one value per sample, and a sum over targets with its count."""
    logits = model(batch["words"])
    hits = (logits.argmax(-1)[:, :-1] == batch["labels"][:, 1:]).sum()
    return {"error": (logits.mean((1, 2)) - batch["value"]).square(), "hits": ab.LossSum(hits, targets(batch))}


def targets(batch: Batch) -> torch.Tensor:
    """Return the number of targets."""
    return (batch["labels"][:, 1:] != -100).sum()


def predict_weighted(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy over targets weighted by their words."""
    logits, words = model(batch["words"])[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(logits.reshape(-1, NUM_WORDS), words.reshape(-1), weight=WORD_WEIGHTS)


def weight_of_words(batch: Batch) -> torch.Tensor:
    """Return the sum of the targets' weights."""
    words = batch["labels"][:, 1:]
    return WORD_WEIGHTS[words[words != -100]].sum()


def predict_total(model: Any, batch: Batch) -> torch.Tensor:
    """Return the cross-entropy summed over unmasked targets."""
    return predict_sum(model, batch).total


METRICS: Mapping[str, "Loss | Callable[..., Any] | None"] = {
    "the loss": None,
    "several": words_and_values,
    "two terms": ab.sum_of(predict_and_value, lm=ab.tokens(), aux=ab.samples(weight=AUX_WEIGHT)),
    "undeclared": predict_sum,
    "weighted": ab.mean_over(predict_weighted, count=weight_of_words),
    "summed": ab.sum_over_samples(predict_total),
}


def evaluation_set() -> list[Batch]:
    """Return three batches: the second has many samples without targets, and the last is smaller."""
    return [sentences(), sentences_masked(0, 21), sentences(5)]


def plain(name: str) -> dict[str, float]:
    """Return the metrics from one forward over all samples."""
    torch.manual_seed(0)
    model = dropping().eval()
    parts = evaluation_set()
    batch = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    with torch.no_grad():
        if name == "several":
            found = words_and_values(model, batch)
            return {
                "error": float(found["error"].mean()),
                "hits": int(found["hits"].total) / int(found["hits"].count),
            }
        if name == "two terms":
            return {key: float(value) for key, value in predict_and_value(model, batch).items()}
        if name == "summed":
            return {"loss": float(predict_total(model, batch)) / len(batch["words"])}
        if name == "weighted":
            return {"loss": float(predict_weighted(model, batch))}
        return {"predict_sum" if name == "undeclared" else "loss": float(predict(model, batch))}


class Dropping(nn.Module):
    """A language model followed by dropout, which evaluation has to switch off."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = language_model()
        self.dropout = nn.Dropout(0.5)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        dropped: torch.Tensor = self.dropout(self.inside(words))
        return dropped


def dropping() -> nn.Module:
    """Return a model with dropout."""
    return Dropping()


EVALUATED_SIZES: tuple[int | None, ...] = (3,)


def evaluated(strategy: str) -> dict[tuple[str, int | None, bool], dict[str, float]]:
    """Run on every rank: return all metrics for each micro-batch size, from dealt batches and from rank shares."""
    world = ab.World.from_environment()
    found = {}
    for size in EVALUATED_SIZES:
        model = dropping()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options: dict[str, Any] = {"micro_batch_size": size, "strategy": STRATEGIES[strategy](), "world": world}
        with ab.Engine(model, optimizer, ab.mean_over_tokens(predict), **options) as engine:
            for name, metric in METRICS.items():
                whole = [InMemory(batch) for batch in evaluation_set()]
                found[name, size, True] = engine.evaluate(whole, metric)
                own = [cut(batch, 3, None) if world.rank == 0 else cut(batch, 0, 3) for batch in evaluation_set()]  # type: ignore[arg-type]
                if world.size == 2:
                    found[name, size, False] = engine.evaluate(own, metric)
    return found


@pytest.mark.parametrize("strategy", ["all_reduce", "ddp"])
def test_metrics_match_the_plain_ones(strategy: str, ranks: Ranks) -> None:
    """On every rank, each metric equals one forward over all samples, for any micro-batch size and number of ranks."""
    expected = {name: plain(name) for name in METRICS}
    for found in ranks.run(evaluated, strategy):
        assert len(found) == len(METRICS) * len(EVALUATED_SIZES) * (2 if ranks.world_size == 2 else 1)
        for (name, _, _), values in found.items():
            assert values == pytest.approx(expected[name], rel=1e-12)


def make_engine(model: nn.Module, **options: Any) -> ab.Engine:
    """Return an engine on one rank."""
    return sgd_engine(model, micro_batch_size=2, world=ab.World(), **options)


def test_module_modes_are_restored() -> None:
    """Evaluation restores the train or eval mode of each module, also after an error."""
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 4)).double()
    model.get_submodule("1").eval()
    before = [module.training for module in model.modules()]
    seen = []

    def metric(model: nn.Module, batch: Batch) -> torch.Tensor:
        seen.append((any(module.training for module in model.modules()), torch.is_grad_enabled()))
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

    with make_engine(model) as engine:
        engine.evaluate([vectors(5)], metric)
        assert [module.training for module in model.modules()] == before
        with raises(LossError, "no_count"):
            engine.evaluate([vectors(5)], classify)
        assert [module.training for module in model.modules()] == before
    assert seen == [(False, False)] * 3
    assert before == [True, True, False, True, True]


@sees(
    "the decay of a moving average is inverted",
    "src/anybatch/engine/schedule.py",
    "1.0 - self.decay)",
    "self.decay / 3)",
)
@sees(
    "averaged weights stay in the model",
    "src/anybatch/engine/schedule.py",
    """
            self._put(trained)
""",
    """
            pass
""",
)
def test_averaged_weights_are_temporary() -> None:
    """evaluate(averaged=True) uses the moving average of the weights and then restores the model's weights."""
    torch.manual_seed(3)
    model = nn.Linear(5, 4).double()
    average = [parameter.detach().clone() for parameter in model.parameters()]
    with make_engine(model, average_decay=0.5) as engine:
        for number in range(3):
            engine.step(vectors(6 + number))
            for mean, parameter in zip(average, model.parameters(), strict=True):
                mean.mul_(0.5).add_(parameter.detach(), alpha=0.5)
        own = [parameter.detach().clone() for parameter in model.parameters()]
        found = engine.evaluate([vectors(5)], averaged=True)
        assert all(torch.equal(one, other) for one, other in zip(own, model.parameters(), strict=True))
    logits = F.linear(vectors(5)["x"], average[0], average[1])
    assert found["loss"] == pytest.approx(float(F.cross_entropy(logits, vectors(5)["y"])), rel=1e-12)


def ranked(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return scores and labels."""
    return model(batch["x"])[:, 0], {"label": batch["y"]}


def area(outputs: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> torch.Tensor:
    """Return the area under the curve: the share of pairs in which class 0 has the larger score."""
    scores, labels = outputs[0], outputs[1]["label"]
    return (scores[labels == 0][:, None] > scores[labels != 0][None]).double().mean()


def in_order(outputs: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return metrics that depend on the number and order of the samples."""
    return {"weighted": (outputs[0] * torch.arange(len(outputs[0]))).sum(), "number": torch.tensor(len(outputs[0]))}


def over_whole_sets(strategy: str) -> list[dict[str, float]]:
    """Run on every rank: return metrics over the whole set for several micro-batch sizes."""
    world, found = ab.World.from_environment(), []
    for size in (1, 4):
        torch.manual_seed(0)
        model = nn.Linear(5, 4).double()
        with sgd_engine(model, micro_batch_size=size, strategy=STRATEGIES[strategy](), world=world) as engine:
            for compute in (area, in_order):
                batches = [InMemory(vectors(11)), InMemory(vectors(1)), InMemory(vectors(23))]
                found.append(engine.evaluate(batches, OverWholeSet(ranked, compute)))
    return found


@pytest.mark.parametrize("strategy", ["all_reduce", "ddp"])
def test_metrics_over_the_whole_set_match_the_plain_ones(strategy: str, ranks: Ranks) -> None:
    """Metrics over the whole set get all rows in the order of the data, for any cut and number of ranks."""
    torch.manual_seed(0)
    model = nn.Linear(5, 4).double()
    batch = {key: torch.cat([vectors(number)[key] for number in (11, 1, 23)]) for key in ("x", "y")}
    with torch.no_grad():
        rows = ranked(model, batch)
    expected = [{"metric": float(area(rows))}, {name: float(value) for name, value in in_order(rows).items()}] * 2
    for found in ranks.run(over_whole_sets, strategy):
        assert found == [pytest.approx(one, rel=1e-12) for one in expected]


class Area:
    """A metric object in the style of torchmetrics."""

    def update(self, scores: torch.Tensor, labels: torch.Tensor) -> None:
        """Take some samples."""

    def compute(self) -> float:
        """Return the value."""
        return 1.0


def test_metrics_without_the_model_or_rows_are_refused() -> None:
    """Metric objects, and functions that return one number instead of rows, raise an error with the fix."""
    with make_engine(nn.Linear(5, 4).double()) as engine:
        with raises(UserError, "metric_object"):
            engine.evaluate([vectors(5)], Area())  # type: ignore[arg-type]
        averaged = OverWholeSet(lambda model, batch: model(batch["x"]).mean(), float)
        with raises(LossError, "no_rows"):
            engine.evaluate([vectors(5)], averaged)
        with pytest.raises(LossError):
            engine.evaluate([], OverWholeSet(ranked, area))
