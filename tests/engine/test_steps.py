"""Steps: a run with any cut and any ranks equals the plain run, and so do its reports."""

from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.core.batch import Position
from anybatch.core.records import MicroBatchRecord, PhaseRecord, Record, ReductionRecord, StartRecord, StepRecord
from anybatch.testing import relative_error
from tests.engine.cases import (
    AUX_WEIGHT,
    CASES,
    SPLITS,
    STRATEGIES,
    Batch,
    InMemory,
    arrive,
    classify,
    combinations,
    cut,
    perceptron,
    predict_and_value,
    sentences,
    sentences_masked,
    sgd_engine,
    vectors,
)
from tests.faults import sees
from tests.ranks_fixture import Ranks

TOLERANCE = 1e-12
CASE = CASES["two terms, some without targets"]


def step_batch(number: int) -> Batch:
    """Return the batch of a step; sizes differ, and the last one has no target."""
    return (sentences(), cut(sentences(), 0, 17), sentences_masked(0, 29))[number]


def plain_run() -> tuple[dict[str, torch.Tensor], list[list[float]]]:
    """Train on full batches in plain PyTorch; return the parameters and the loss, terms, norm and rate of each step."""
    model = CASE.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    told = []
    for number in range(3):
        batch = step_batch(number)
        optimizer.zero_grad()
        terms = predict_and_value(model, batch)
        loss = CASE.reference(model, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        rate = optimizer.param_groups[0]["lr"]
        told.append([float(value.detach()) for value in (loss, terms["lm"], terms["aux"], norm)] + [rate])
        optimizer.step()
        scheduler.step()
    return model.state_dict(), told


def run(split: str, strategy: str) -> tuple[dict[str, torch.Tensor], list[list[float]], list[tuple[Any, ...]]]:
    """Run on every rank: train with the engine; also return step numbers, sizes, counts and kinds of updates."""
    world = ab.World.from_environment()
    model = CASE.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.01)
    told, facts = [], []
    with ab.Engine(
        model,
        optimizer,
        CASE.loss,
        micro_batch_size=SPLITS[split].micro_batch_size,
        accumulation_steps=SPLITS[split].accumulation_steps,
        deal=SPLITS[split].deal,
        strategy=STRATEGIES[strategy](),
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5),
        clip=0.1,
        check_loss=False,
        world=world,
    ) as engine:
        for number in range(3):
            report = engine.step(arrive(step_batch(number), SPLITS[split], world))
            losses = report.losses
            told.append([report.loss, losses["lm"], losses["aux"], report.grad_norm or 0.0, *report.learning_rates])
            facts.append((report.step, report.num_samples, report.counts.tolist(), report.skipped, report.update))
    return model.state_dict(), [[float(number) for number in row] for row in told], facts


def runs() -> dict[tuple[str, str], tuple[Any, ...]]:
    """Run on every rank: return the runs of all splits and strategies."""
    return {key: run(*key) for key in combinations(ab.World.from_environment().size)}


@sees(
    "the norm is measured after clipping",
    "src/anybatch/engine/updater.py",
    """
        self.target.cast(gradients)
        return norm
""",
    """
        self.target.cast(gradients)
        return norm if norm is None else self.layout.norm(present)
""",
    cases=["1-rank"],
)
@sees(
    "the report has only this rank's numbers",
    "src/anybatch/parallel/agreement.py",
    "return self._report_sums.new_tensor(sums), flags",
    "return self._report_sums, flags",
    cases=["2-ranks"],
)
def test_a_run_equals_the_plain_run(ranks: Ranks) -> None:
    """Three clipped steps with momentum and a scheduler end at the plain parameters for any rank, cut and strategy.

    Reports have the plain loss, terms, norm and learning rate; a term without items is NaN in both.
    """
    parameters, told = plain_run()
    counts = [int((step_batch(number)["labels"][:, 1:] != -100).sum()) for number in range(3)]
    assert counts[2] == 0
    for found in ranks.run(runs):
        assert len(found) == len(combinations(ranks.world_size))
        for key, (state, reported, facts) in found.items():
            assert relative_error(state, parameters) <= TOLERANCE, key
            for row, plain_row in zip(reported, told, strict=True):
                assert row == pytest.approx(plain_row, rel=1e-12, nan_ok=True)
            assert facts == [
                (number, size, [counts[number], size], False, "direct") for number, size in enumerate((29, 17, 29))
            ]


@sees(
    "the weight of a term is forgotten",
    "src/anybatch/core/loss.py",
    "unit_weight * term.weight / divisor",
    "unit_weight / divisor",
    also=["tests/engine/test_exactness.py::test_gradient_equals_the_unsplit_batch[1-rank-two terms]"],
)
def test_a_loss_is_the_weighted_sum_of_its_terms() -> None:
    """report.loss is the weighted sum of the terms; report.losses are the unweighted terms."""
    model = CASE.model()
    plain = {name: float(term.detach()) for name, term in predict_and_value(model, sentences()).items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ab.Engine(model, optimizer, CASE.loss, micro_batch_size=3, world=ab.World()) as engine:
        report = engine.step(sentences())
    assert report.losses == pytest.approx(plain, rel=1e-12)
    assert report.loss == pytest.approx(plain["lm"] + AUX_WEIGHT * plain["aux"], rel=1e-12)
    assert report.weights == {"lm": 1.0, "aux": AUX_WEIGHT}


def make_engine(model: nn.Module, **options: Any) -> ab.Engine:
    """Return an engine on one rank."""
    return sgd_engine(model, **{"micro_batch_size": 3, "world": ab.World(), **options})


@sees(
    "the position of hand-made batches restarts",
    "src/anybatch/engine/micro_batches.py",
    "end=Position(start.epoch, start.sample_offset + sum(sizes)),",
    "end=Position(start.epoch, sum(sizes)),",
)
def test_positions_advance() -> None:
    """A step ends at its batch's position; hand-made batches advance the position by their samples."""
    with make_engine(perceptron()) as engine:
        assert engine.step(InMemory(vectors(29), end=Position(2, 29))).position == Position(2, 29)
        assert engine.step(vectors(7)).position == engine.position == Position(2, 36)


def test_computing_gradients_changes_nothing() -> None:
    """engine.gradients leaves parameters, gradients, progress and the next step unchanged."""
    stepped, looked = perceptron(), perceptron()
    with make_engine(stepped) as engine:
        engine.step(vectors(29))
    with make_engine(looked) as engine:
        first = engine.gradients(vectors(29))
        kept = {name: None if gradient is None else gradient.clone() for name, gradient in first.items()}
        second = engine.gradients(vectors(29))
        assert (engine.num_steps, engine.position) == (0, Position())
        assert all(parameter.grad is None for parameter in looked.parameters())
        engine.step(vectors(29))
    assert relative_error(first, second) == 0.0
    assert relative_error(first, kept) == 0.0
    assert relative_error(looked.state_dict(), stepped.state_dict()) == 0.0


def test_a_closed_engine_leaves_no_hook(two_ranks: Ranks) -> None:
    """After closing, a plain backward of the model works as before, despite any hooks of the strategy.

    This includes bf16 parameters, whose gradients a strategy moves out during the backward.
    """
    assert all(error <= TOLERANCE for errors in two_ranks.run(errors_after_closing) for error in errors)


def errors_after_closing() -> list[float]:
    """Run on every rank: return the errors of plain gradients after the engines are closed."""
    errors = []
    for strategy, dtype in (("all_reduce", torch.float64), ("ddp", torch.float64), ("all_reduce", torch.bfloat16)):
        model, untouched = perceptron().to(dtype), perceptron().to(dtype)
        whole, piece = ({"x": batch["x"].to(dtype), "y": batch["y"]} for batch in (vectors(12), vectors(7)))
        with make_engine(model, strategy=STRATEGIES[strategy](), world=ab.World.from_environment()) as engine:
            engine.gradients(InMemory(whole))
        for one in (model, untouched):
            one.zero_grad()
            classify(one, piece).backward()
        found, expected = ({name: p.grad for name, p in one.named_parameters()} for one in (model, untouched))
        errors.append(relative_error(found, expected))
    return errors


class Recorder:
    """Keeps all records."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def observe(self, record: Record) -> None:
        """Keep a record."""
        self.records.append(record)


def observed(strategy: str) -> tuple[list[Record], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Run on every rank: return the records of two steps, and the parameters with and without observer."""
    world = ab.World.from_environment()
    recorder = Recorder()
    states = []
    for observer in (recorder, None):
        model = perceptron()
        strategy_object = STRATEGIES[strategy]()
        with make_engine(model, strategy=strategy_object, world=world, observer=observer) as engine:
            for _ in range(2):
                engine.step(InMemory(vectors(29)))
        states.append(model.state_dict())
    return recorder.records, states[0], states[1]


@pytest.mark.parametrize("strategy", ["all_reduce", "ddp"])
def test_observers_do_not_change_a_run(strategy: str, two_ranks: Ranks) -> None:
    """Micro-batches, reductions, phases and steps are reported in pairs, and observers do not change the run."""
    for rank, (records, watched, unwatched) in enumerate(two_ranks.run(observed, strategy)):
        assert relative_error(watched, unwatched) == 0.0
        assert [type(record) for record in records].count(StartRecord) == 1
        steps = [record for record in records if isinstance(record, StepRecord)]
        assert [record.step for record in steps] == [0, 1]
        assert [record.num_samples for record in steps] == [29, 29]
        ended = [record for record in records if isinstance(record, MicroBatchRecord) and record.event == "end"]
        assert [record.num_samples for record in ended] == ([3] * 5 if rank == 0 else [3] * 4 + [2]) * 2
        assert [record.first_sample_id for record in ended[:5]] == [15 * rank + 3 * number for number in range(5)]
        for kind in (MicroBatchRecord, PhaseRecord, ReductionRecord):
            told = [record for record in records if isinstance(record, kind)]
            assert sum(record.event == "begin" for record in told) == sum(record.event == "end" for record in told) > 0
        bytes_sent = sum(r.num_bytes for r in records if isinstance(r, ReductionRecord) and r.event == "end")
        assert bytes_sent == 2 * 8 * sum(parameter.numel() for parameter in perceptron().parameters())


@sees(
    "a step is run in the micro-batches of the first step",
    "src/anybatch/engine/micro_batches.py",
    "        if plan is not self._newest[0]:\n",
    "        if self._newest[0] is None:\n",
)
def test_each_batch_is_divided_by_its_own_size() -> None:
    """Steps of 24, 7, 24 and 16 samples, as at the ends of epochs, each equal the plain mean."""
    model, plain = perceptron(), perceptron()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    with ab.Engine(model, optimizers[0], ab.mean_over_samples(classify), micro_batch_size=8) as engine:
        for size in (24, 7, 24, 16):
            report = engine.step(vectors(size))
            value = classify(plain, vectors(size))
            optimizers[1].zero_grad()
            value.backward()
            optimizers[1].step()
            assert report.loss == pytest.approx(float(value.detach()), rel=TOLERANCE)
            assert report.counts.tolist() == [size]
    assert relative_error(dict(model.named_parameters()), dict(plain.named_parameters())) <= TOLERANCE
